"""Credit: which later rewards a decision answers for. Every `credit` is [N G T]."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, mean_and_variance, reverse_cumulative, uniform
from apportion.core.parts.base import Part
from apportion.core.rollouts import Rollouts


def discount(rollouts: Rollouts, gamma: float) -> Array:
    """[N G T] factor to the next decision: gamma, 1 across a masked position, 0 across an end.

    A tool's output is not a decision: time does not pass there, and reward on it reaches earlier decisions whole.
    """
    xp = array_namespace(rollouts.reward)
    decay = xp.where(rollouts.mask, xp.full_like(rollouts.reward, gamma), xp.ones_like(rollouts.reward))
    return decay * (1.0 - as_float(rollouts.end, rollouts.reward))


def totals(rollouts: Rollouts, reward: Array, gamma: float = 1.0) -> Array:
    """[N G 1] return of each trajectory, discounted from its first decision."""
    xp = array_namespace(reward)
    if gamma == 1.0:
        return xp.sum(reward, axis=-1, keepdims=True)
    return reverse_cumulative(reward, discount(rollouts, gamma))[..., :1]


@dataclass(frozen=True)
class Credit(Part):
    """Base of the credit parts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """Credit [N G T] from the shaped reward [N G T] (task reward less the KL penalty, if any)."""


@dataclass(frozen=True)
class Total(Credit):
    """Every decision answers for the whole return of its trajectory.

    >>> import numpy as np
    >>> r = Rollouts(np.array([[[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]]), np.ones((1, 2, 3), bool), np.zeros((1, 2, 3)))
    >>> Total()(r, r.reward)
    array([[[1. , 1. , 1. ],
            [0.5, 0.5, 0.5]]])
    """

    gamma: float = 1.0
    equation: ClassVar[str] = "C_t = sum_s gamma^s r_s"
    source: ClassVar[str] = "Williams 1992, eq. 2"

    def __post_init__(self) -> None:
        self._require("gamma", 0 < self.gamma <= 1, "in (0, 1]")

    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """See `Credit`."""
        return totals(rollouts, reward, self.gamma) + array_namespace(reward).zeros_like(reward)

    def flat(self) -> list[str]:
        """See `Part`."""
        if self.gamma == 1.0:
            return ["credit = reward.sum(-1, keepdims=True) + 0 * reward"]
        return [f"credit = backwards(reward, {self.gamma})[..., :1] + 0 * reward"]


@dataclass(frozen=True)
class RewardToGo(Credit):
    """A decision answers only for what comes after it (causality): same expectation, less variance.

    >>> import numpy as np
    >>> r = Rollouts(np.array([[[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]]), np.ones((1, 2, 3), bool), np.zeros((1, 2, 3)))
    >>> RewardToGo(gamma=0.5)(r, r.reward)
    array([[[0.25, 0.5 , 1.  ],
            [0.25, 0.5 , 0.  ]]])
    """

    gamma: float = 1.0
    equation: ClassVar[str] = "C_t = sum_{s>=t} gamma^(s-t) r_s"
    source: ClassVar[str] = "Sutton et al. 2000, theorem 1; Baxter & Bartlett 2001"

    def __post_init__(self) -> None:
        self._require("gamma", 0 <= self.gamma <= 1, "in [0, 1]")

    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """See `Credit`."""
        return reverse_cumulative(reward, discount(rollouts, self.gamma))

    def flat(self) -> list[str]:
        """See `Part`."""
        return [f"credit = backwards(reward, {self.gamma})"]


@dataclass(frozen=True)
class Imitate(Credit):
    """Every decision of a kept trajectory counts the same: the sampler's filter has done the judging."""

    equation: ClassVar[str] = "C_t = 1"
    source: ClassVar[str] = "Dong et al. 2023 (RAFT), eq. 4"

    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """See `Credit`."""
        return array_namespace(reward).ones_like(reward)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["credit = np.ones_like(reward)"]


@dataclass(frozen=True)
class GAE(Credit):
    """The lambda-return: reward-to-go that hands over to the critic, at rate 1 - lambda each decision.

    `credit - value` is the generalised advantage, and `credit` itself is the critic's regression target.
    A time limit bootstraps from the value of the true next state; only a real end counts as 0.

    >>> import numpy as np
    >>> ones, zeros = np.ones((1, 1, 3)), np.zeros((1, 1, 3))
    >>> r = Rollouts(ones, ones > 0, zeros, value=zeros, next_value=zeros, terminated=np.array([[[0, 1, 0]]]) > 0)
    >>> GAE(gamma=1.0, lam=1.0)(r, r.reward)  # nothing crosses the end at the second decision
    array([[[2., 1., 1.]]])
    """

    gamma: float = 0.99
    lam: float = 0.95
    equation: ClassVar[str] = "C_t = V_t + sum_{s>=t} (gamma lambda)^(s-t) (r_s + gamma V_{s+1} - V_s)"
    source: ClassVar[str] = "Schulman et al. 2016 (GAE), eq. 16"

    def __post_init__(self) -> None:
        self._require("gamma", 0 < self.gamma <= 1, "in (0, 1]")
        self._require("lam", 0 <= self.lam <= 1, "in [0, 1]")

    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """See `Credit`. Needs `value` and `next_value`."""
        value, next_value = rollouts.value, rollouts.next_value
        assert value is not None
        assert next_value is not None
        alive = 1.0 - as_float(rollouts.task_end, reward)
        m = as_float(rollouts.mask, reward)
        delta = reward + m * (self.gamma * alive * next_value - value)
        return m * value + reverse_cumulative(delta, discount(rollouts, self.gamma * self.lam))

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            f"delta = reward + mask * ({self.gamma} * (1 - terminated) * next_value - value)",
            f"credit = mask * value + backwards(delta, {self.gamma} * {self.lam})",
        ]


@dataclass(frozen=True)
class Process(Credit):
    """Process supervision: step rewards are normalised over all steps of the group, then summed from t on.

    Without declared steps the last decision is the only step, and this is outcome supervision.
    """

    ddof: int = 1
    eps: float = 1e-6
    equation: ClassVar[str] = "C_t = sum_{steps s>=t} (r_s - mean_group(r)) / (std_group(r) + eps)"
    source: ClassVar[str] = "Shao et al. 2024 (DeepSeekMath), section 4.1.3"
    scope: ClassVar = "group"
    affine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._require("ddof", self.ddof in (0, 1), "0 (population) or 1 (sample)")
        self._require("eps", self.eps >= 0, "0 or more")

    def __call__(self, rollouts: Rollouts, reward: Array) -> Array:
        """See `Credit`. Declared steps must hold all the reward (`Rollouts.check` sees to it)."""
        xp = array_namespace(reward)
        if rollouts.step is None:
            step, reward = rollouts.last, totals(rollouts, reward) + xp.zeros_like(reward)
        else:
            step = rollouts.step
        step = xp.logical_and(step, rollouts.count[..., None])
        s, group = as_float(step, reward), (-2, -1)
        mean, square = mean_and_variance(reward, s, group, self.ddof)
        scaled = s * (reward - mean) / xp.where(square > 0, xp.sqrt(square) + self.eps, 1.0)
        scaled = xp.where(uniform(reward, step, group), xp.zeros_like(scaled), scaled)
        return xp.flip(xp.cumulative_sum(xp.flip(scaled, axis=-1), axis=-1), axis=-1)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "own = np.where(step, reward, np.nan)",
            "centred = own - np.nanmean(own, axis=(1, 2), keepdims=True)",
            f"spread = np.nanstd(own, axis=(1, 2), ddof={self.ddof}, keepdims=True) + {self.eps}",
            "credit = np.nan_to_num(centred / spread)[..., ::-1].cumsum(-1)[..., ::-1]",
        ]
