"""The rule that chooses settings: the same number of trials for every arm, the largest area under the curve wins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.core.errors import ApportionError
from apportion.core.values import value
from apportion.study.budgets import Budget

Setting = tuple[str, Any]
"""(path, value), such as ("sampler.group", 8)."""


@dataclass(frozen=True)
class Tuning:
    """Trials before the comparison.

    Every arm draws `trials` combinations without replacement from the product of its candidates and runs each on
    `seeds`, which the comparison does not use, for `budget` (by task; the study's own where none is given). The
    combination with the largest mean area under the training curve is chosen; of equal ones, the first.

    candidates: (path, list of values); "setup.envs, sampler.horizon" with a list of pairs moves two paths together.
    draw: the seed of the drawing.
    """

    trials: int
    seeds: tuple[int, ...]
    candidates: tuple[tuple[str, Any], ...]
    budget: Mapping[str, Budget] = field(default_factory=dict)
    draw: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("draw", 0)):
            x = getattr(self, name)
            if not isinstance(x, int) or isinstance(x, bool) or x < least:
                raise ApportionError(f"tuning.{name} is {x!r}; it must be a whole number of {least} or more")

    def drawn(self, arm: str, own: Sequence[tuple[str, Any]] = ()) -> list[tuple[Setting, ...]]:
        """The trials of an arm: settings of each, in the product's order. own: its candidates beside the common ones.

        Raises ApportionError when there are fewer combinations than trials: the budget would not be the same for all.

        >>> Tuning(2, (9,), (("update.learning_rate", [0.1, 0.01]),)).drawn("mine")
        [(('update.learning_rate', 0.1),), (('update.learning_rate', 0.01),)]
        """
        import numpy as np

        axes = [_axis(arm, path, values) for path, values in (*self.candidates, *own)]
        combinations = [tuple(itertools.chain(*parts)) for parts in itertools.product(*axes)]
        if len(combinations) < self.trials:
            raise ApportionError(
                f"{arm} has {len(combinations)} combinations of candidates, fewer than tuning.trials = {self.trials}; "
                "every arm needs at least as many: give it more candidates, or lower tuning.trials"
            )
        order = np.random.default_rng(self.draw).permutation(len(combinations))[: self.trials]
        return [combinations[i] for i in sorted(order)]


def _axis(arm: str, path: str, values: Any) -> list[tuple[Setting, ...]]:
    """The candidates of one key: each a tuple of settings."""
    names = [name.strip() for name in path.split(",")]
    if not isinstance(values, list | tuple) or not values:
        raise ApportionError(f"candidates of {path} ({arm}) is {values!r}; it must be a list of values")
    axis = []
    for one in values:
        parts = [one] if len(names) == 1 else one
        if not isinstance(parts, list | tuple) or len(parts) != len(names):
            raise ApportionError(
                f"candidates of {path} ({arm}) holds {one!r}; it must hold lists of {len(names)} values"
            )
        axis.append(tuple((n, value(p) if isinstance(p, str) else p) for n, p in zip(names, parts, strict=True)))
    return axis


def pick(areas: Sequence[Sequence[float]]) -> int:
    """The trial with the largest mean area; areas: [trials][seeds], -inf for a run that diverged.

    >>> pick([[1.0, 3.0], [2.5, 2.5], [9.0, -math.inf]])
    1
    """
    means = [math.fsum(a) / len(a) if all(map(math.isfinite, a)) else -math.inf for a in areas]
    return means.index(max(means))
