"""Aggregation: the denominator each decision is counted under. Every `share` is [N G T].

Fixed on the whole collection before it is cut, so that micro-batches, padding, sibling order and the number of
devices cannot change it. `kept` [N G] are the weights the sampler's filter left: the denominators count only those.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, divide
from apportion.core.errors import InvalidData
from apportion.core.parts.base import Part
from apportion.core.rollouts import Rollouts


def _rows(rollouts: Rollouts, kept: Array) -> Array:
    """[N G 1] weight of each kept trajectory; they sum to 1 (all 0 when nothing was kept)."""
    xp = array_namespace(kept)
    weight = rollouts.probability[:, None] * kept
    return divide(weight, xp.sum(weight))[..., None]


@dataclass(frozen=True)
class Aggregate(Part):
    """Base of the aggregation parts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts, kept: Array) -> Array:
        """Share [N G T] of each decision in the loss, from the filter's weights [N G]."""


@dataclass(frozen=True)
class Sum(Aggregate):
    """Decisions add up; trajectories are averaged. The policy gradient as it is derived."""

    equation: ClassVar[str] = "share = 1 / rows"
    source: ClassVar[str] = "Williams 1992"

    def __call__(self, rollouts: Rollouts, kept: Array) -> Array:
        """See `Aggregate`."""
        return _rows(rollouts, kept) * as_float(rollouts.mask, kept)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["share = rows * mask"]


@dataclass(frozen=True)
class SequenceMean(Aggregate):
    """Each trajectory is divided by its own length: a decision in a long answer weighs less (the length bias)."""

    equation: ClassVar[str] = "share = 1 / (rows · L_i)"
    source: ClassVar[str] = "Shao et al. 2024 (DeepSeekMath), eq. 3"

    def __call__(self, rollouts: Rollouts, kept: Array) -> Array:
        """See `Aggregate`."""
        xp = array_namespace(kept)
        m = as_float(rollouts.mask, kept)
        return _rows(rollouts, kept) * divide(m, xp.sum(m, axis=-1, keepdims=True))

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["share = rows * mask / np.maximum(mask.sum(-1, keepdims=True), 1)"]


@dataclass(frozen=True)
class DecisionMean(Aggregate):
    """All decisions of the collection count the same: divided by their number over the whole batch."""

    equation: ClassVar[str] = "share = 1 / sum_i L_i"
    source: ClassVar[str] = "Yu et al. 2025 (DAPO), eq. 8"
    scope: ClassVar = "batch"

    def __call__(self, rollouts: Rollouts, kept: Array) -> Array:
        """See `Aggregate`."""
        xp = array_namespace(kept)
        weight = _rows(rollouts, kept) * as_float(rollouts.mask, kept)
        return divide(weight, xp.sum(weight))

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["share = rows * mask / (rows * mask).sum()"]


@dataclass(frozen=True)
class Constant(Aggregate):
    """Divided by one constant for all: no length bias.

    length: decisions; None takes the task's horizon (time limit, maximum response length), never the padded width.
    """

    length: float | None = None
    equation: ClassVar[str] = "share = 1 / (rows · L_max)"
    source: ClassVar[str] = "Liu et al. 2025 (Dr. GRPO), section 3.2 and its code"

    def __post_init__(self) -> None:
        self._require("length", self.length is None or self.length > 0, "more than 0, or None for the horizon")

    def __call__(self, rollouts: Rollouts, kept: Array) -> Array:
        """See `Aggregate`. Raises InvalidData when neither the part nor the rollouts name a length."""
        length = self.length if self.length is not None else rollouts.horizon
        if length is None:
            raise InvalidData("Constant() needs a length: give Constant(length=...) or Rollouts(horizon=...)")
        return _rows(rollouts, kept) * as_float(rollouts.mask, kept) / float(length)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [f"share = rows * mask / {'horizon' if self.length is None else self.length}"]
