"""The sampler's filter: which trajectories stay. A hidden filter changes denominators, so it is declared in q."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, uniform
from apportion.core.parts.base import Part
from apportion.core.parts.credit import totals
from apportion.core.rollouts import Rollouts


@dataclass(frozen=True)
class Keep(Part):
    """Base of the filters."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts) -> Array:
        """Weight [N G] in [0, 1] with which each trajectory stays, from the task's own reward."""


def _all(rollouts: Rollouts) -> Array:
    return as_float(rollouts.count, rollouts.reward)


@dataclass(frozen=True)
class KeepAll(Keep):
    """Everything stays."""

    equation: ClassVar[str] = "keep = 1"

    def __call__(self, rollouts: Rollouts) -> Array:
        """See `Keep`. An unscored row still counts in the denominators: its advantage is 0."""
        return array_namespace(rollouts.reward).ones_like(rollouts.reward[..., 0])

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["keep = np.ones(reward.shape[:2])"]


@dataclass(frozen=True)
class KeepMixed(Keep):
    """Dynamic sampling: groups whose returns are all equal carry no signal and are dropped, whole.

    max_batches: collections to try for a full batch before going on with what there is, saying so.
    """

    max_batches: int = 10
    equation: ClassVar[str] = "keep group if min R < max R"
    source: ClassVar[str] = "Yu et al. 2025 (DAPO), eq. 11"
    scope: ClassVar = "batch"
    affine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._require("max_batches", self.max_batches >= 1, "1 or more")

    def __call__(self, rollouts: Rollouts) -> Array:
        """See `Keep`.

        >>> import numpy as np
        >>> r = np.array([[[1.0], [0.0], [0.0]], [[0.3], [0.3], [0.1 + 0.2]]])
        >>> KeepMixed()(Rollouts(r, r == r, 0 * r))
        array([[1., 1., 1.],
               [0., 0., 0.]])
        """
        xp = array_namespace(rollouts.reward)
        same = uniform(totals(rollouts, rollouts.reward)[..., 0], rollouts.count, 1)
        return as_float(xp.logical_not(same), rollouts.reward) * _all(rollouts)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "total = reward.sum(-1)",
            "keep = np.ones(reward.shape[:2]) * (np.ptp(total, axis=1, keepdims=True) > 1e-12)",
        ]


@dataclass(frozen=True)
class KeepBest(Keep):
    """The best sibling of each group stays; ties share the place evenly."""

    equation: ClassVar[str] = "keep = [R_i = max_j R_j] / ties"
    source: ClassVar[str] = "Dong et al. 2023 (RAFT), algorithm 1"
    scope: ClassVar = "group"
    affine: ClassVar[bool] = False

    def __call__(self, rollouts: Rollouts) -> Array:
        """See `Keep`."""
        xp = array_namespace(rollouts.reward)
        total = xp.where(rollouts.count, totals(rollouts, rollouts.reward)[..., 0], -math.inf)
        best = as_float(total >= xp.max(total, axis=1, keepdims=True), rollouts.reward) * _all(rollouts)
        return best / xp.clip(xp.sum(best, axis=1, keepdims=True), min=1.0)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "total = reward.sum(-1)",
            "keep = (total == total.max(1, keepdims=True)) * 1.0",
            "keep = keep / keep.sum(1, keepdims=True)",
        ]


@dataclass(frozen=True)
class KeepAccepted(Keep):
    """Rejection sampling towards pi* ∝ q · exp(R / beta): each trajectory stays with its acceptance probability.

    best: the largest possible return, where acceptance is 1.
    """

    beta: float = 0.5
    best: float = 1.0
    equation: ClassVar[str] = "keep = exp((R - R_max) / beta)"
    source: ClassVar[str] = "Liu et al. 2024 (RSO), section 3.2"

    def __post_init__(self) -> None:
        self._require("beta", self.beta > 0, "more than 0")

    def __call__(self, rollouts: Rollouts) -> Array:
        """See `Keep`."""
        xp = array_namespace(rollouts.reward)
        total = totals(rollouts, rollouts.reward)[..., 0]
        return xp.exp(xp.clip((total - self.best) / self.beta, max=0.0)) * _all(rollouts)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [f"keep = np.exp(np.minimum((reward.sum(-1) - {self.best}) / {self.beta}, 0))"]
