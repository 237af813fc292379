"""Baselines: what a decision could have expected anyway. Every `baseline` is [N G T].

A baseline that does not look at the decision's own action leaves the expected update as it is and only lowers
its variance. One that does (a group mean that includes the sibling itself) shrinks or bends it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, divide, uniform
from apportion.core.parts.base import Part
from apportion.core.parts.credit import totals
from apportion.core.rollouts import Rollouts


@dataclass(frozen=True)
class Baseline(Part):
    """Base of the baseline parts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """Baseline [N G T] from the shaped reward [N G T] and the credit [N G T]."""


@dataclass(frozen=True)
class NoBaseline(Baseline):
    """Nothing is subtracted."""

    equation: ClassVar[str] = "b = 0"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`."""
        return array_namespace(credit).zeros_like(credit)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["baseline = 0 * credit"]


def _sibling_sum(rollouts: Rollouts, x: Array) -> tuple[Array, Array, Array]:
    """Sum over scored siblings, their number, and the mask that says which count; x is [N G K]."""
    xp = array_namespace(x)
    scored = as_float(rollouts.count, x)[..., None]
    return (
        xp.sum(scored * x, axis=1, keepdims=True),
        xp.sum(scored, axis=1, keepdims=True),
        rollouts.count[..., None],
    )


@dataclass(frozen=True)
class GroupMean(Baseline):
    """The mean return of the group, the sibling itself included: shrinks the update by (1 - 1/G).

    >>> import numpy as np
    >>> r = Rollouts(np.array([[[1.0], [0.0], [0.0], [0.0]]]), np.ones((1, 4, 1), bool), np.zeros((1, 4, 1)))
    >>> (r.reward - GroupMean()(r, r.reward, r.reward)).ravel()
    array([ 0.75, -0.25, -0.25, -0.25])
    """

    equation: ClassVar[str] = "b_i = mean_j R_j"
    source: ClassVar[str] = "Shao et al. 2024 (DeepSeekMath), section 4.1.2"
    scope: ClassVar = "group"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`. A group of equal returns has an advantage of exactly 0, not of one rounding."""
        xp = array_namespace(credit)
        total = totals(rollouts, reward)
        sum_, n, scored = _sibling_sum(rollouts, total)
        mean = xp.where(uniform(total, scored, 1), total, divide(sum_, n))
        return mean + xp.zeros_like(credit)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["baseline = reward.sum(-1, keepdims=True).mean(1, keepdims=True) + 0 * credit"]


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """The mean return of the other siblings: independent of the decision, so the update stays unbiased.

    >>> import numpy as np
    >>> r = Rollouts(np.array([[[1.0], [0.0], [0.0]]]), np.ones((1, 3, 1), bool), np.zeros((1, 3, 1)))
    >>> (r.reward - LeaveOneOut()(r, r.reward, r.reward)).ravel()
    array([ 1. , -0.5, -0.5])
    """

    equation: ClassVar[str] = "b_i = mean_{j != i} R_j"
    source: ClassVar[str] = "Kool et al. 2019; Ahmadian et al. 2024 (RLOO)"
    scope: ClassVar = "group"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`. A sibling left alone (the others unscored) gets its own return: advantage 0."""
        xp = array_namespace(credit)
        total = totals(rollouts, reward)
        sum_, n, scored = _sibling_sum(rollouts, total)
        others = xp.where(n > 1, (sum_ - total) / xp.clip(n - 1.0, min=1.0), total)
        return xp.where(uniform(total, scored, 1), total, others) + xp.zeros_like(credit)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "total, G = reward.sum(-1, keepdims=True), reward.shape[1]",
            "baseline = (total.sum(1, keepdims=True) - total) / (G - 1) + 0 * credit",
        ]


@dataclass(frozen=True)
class BatchMean(Baseline):
    """The mean credit over all decisions of the collection."""

    equation: ClassVar[str] = "b = mean over all decisions of C"
    source: ClassVar[str] = "Williams 1992, section 4; Tianshou's REINFORCE"
    scope: ClassVar = "batch"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`."""
        xp = array_namespace(credit)
        m = as_float(xp.logical_and(rollouts.mask, rollouts.count[..., None]), credit)
        m = m * rollouts.probability[:, None, None]
        return divide(xp.sum(m * credit), xp.sum(m)) + xp.zeros_like(credit)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "m = mask * mass[:, None, None]",
            "baseline = (m * credit).sum() / m.sum() + 0 * credit",
        ]


@dataclass(frozen=True)
class Greedy(Baseline):
    """The return of the greedy rollout from the same start."""

    equation: ClassVar[str] = "b = R(greedy)"
    source: ClassVar[str] = "Li et al. 2024 (ReMax), algorithm 1"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`. Needs `greedy_return` [N]."""
        assert rollouts.greedy_return is not None
        return rollouts.greedy_return[:, None, None] + array_namespace(credit).zeros_like(credit)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["baseline = greedy_return[:, None, None] + 0 * credit"]


@dataclass(frozen=True)
class Critic(Baseline):
    """The value of the state, from a learned critic or from fresh rollouts (`Sampler.values` says which)."""

    equation: ClassVar[str] = "b_t = V(s_t)"
    source: ClassVar[str] = "Sutton et al. 2000; Schulman et al. 2016"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`. Needs `value` [N G T]."""
        assert rollouts.value is not None
        return as_float(rollouts.mask, credit) * rollouts.value

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["baseline = mask * value"]


@dataclass(frozen=True)
class SiblingMean(Baseline):
    """The mean credit, at the same decision, of the siblings still alive there: a critic for one state and time.

    leave_one_out: leave the sibling itself out (unbiased); false is the published form.
    """

    leave_one_out: bool = False
    equation: ClassVar[str] = "b_it = mean_{j alive at t} C_jt"
    source: ClassVar[str] = "Chen et al. 2025 (GPG for MDPs, arXiv 2510.03679), eq. 5-6 with f = t"
    scope: ClassVar = "group"

    def __call__(self, rollouts: Rollouts, reward: Array, credit: Array) -> Array:
        """See `Baseline`."""
        xp = array_namespace(credit)
        alive = xp.logical_and(rollouts.mask, rollouts.count[..., None])
        a = as_float(alive, credit)
        own = a if self.leave_one_out else xp.zeros_like(a)
        n = xp.sum(a, axis=1, keepdims=True) - own
        mean = xp.where(n > 0, divide(xp.sum(a * credit, axis=1, keepdims=True) - own * credit, n), credit)
        return xp.where(uniform(credit, alive, 1), credit, mean)

    def flat(self) -> list[str]:
        """See `Part`."""
        if self.leave_one_out:
            return [
                "n = mask.sum(1, keepdims=True) - mask",
                "others = (mask * credit).sum(1, keepdims=True) - mask * credit",
                "baseline = np.where(n > 0, others / np.maximum(n, 1), credit)",
            ]
        return [
            "n = np.maximum(mask.sum(1, keepdims=True), 1)",
            "baseline = (mask * credit).sum(1, keepdims=True) / n",
        ]
