"""Trust: how far one collection may move the policy. Every `gate` is [N G T]; w carries gate · ratio.

TRPO's region is no part of w: it is an update rule (`NaturalGradient`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float
from apportion.core.parts.base import Part


@dataclass(frozen=True)
class Trust(Part):
    """Base of the trust parts. `needs_ratio`: without a ratio there is nothing to bound."""

    needs_ratio: ClassVar[bool] = False

    @abstractmethod
    def gate(self, ratio: Array, advantage: Array, logp: Array, logref: Array | None, mask: Array) -> Array:
        """Factor [N G T] on ratio · advantage."""


@dataclass(frozen=True)
class NoTrust(Trust):
    """Nothing is bounded."""

    equation: ClassVar[str] = "gate = 1"

    def gate(self, ratio: Array, advantage: Array, logp: Array, logref: Array | None, mask: Array) -> Array:
        """See `Trust`."""
        return array_namespace(ratio).ones_like(ratio)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["gate = np.ones_like(ratio)"]


@dataclass(frozen=True)
class Clip(Trust):
    """PPO's clip: a decision stops pushing once its ratio has left the band on the side it pushes to.

    low, high: the band [1 - low, 1 + high]. dual: with A < 0, ratios above it stop pushing too (dual clip).

    >>> import numpy as np
    >>> rho, A, on = np.array([5.0, 5.0, 0.5]), np.array([1.0, -1.0, -1.0]), np.ones(3, bool)
    >>> Clip(0.2, 0.2).gate(rho, A, rho, None, on), Clip(0.2, 0.2, dual=3).gate(rho, A, rho, None, on)
    (array([0., 1., 0.]), array([0., 0., 0.]))
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    equation: ClassVar[str] = "gate = [A>0 and rho<=1+high] or [A<0 and 1-low<=rho(<=dual)]"
    source: ClassVar[str] = "Schulman et al. 2017 (PPO), eq. 7; Ye et al. 2020 (dual clip), eq. 4"
    needs_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require("low", 0 <= self.low <= 1, "in [0, 1]: the band starts at 1 - low")
        self._require("high", self.high >= 0, "0 or more: the band ends at 1 + high")
        self._require("dual", self.dual is None or self.dual > 1, "more than 1, or None")

    def gate(self, ratio: Array, advantage: Array, logp: Array, logref: Array | None, mask: Array) -> Array:
        """See `Trust`."""
        xp = array_namespace(ratio)
        up = xp.logical_and(advantage >= 0, ratio <= 1 + self.high)
        down = xp.logical_and(advantage < 0, ratio >= 1 - self.low)
        if self.dual is not None:
            down = xp.logical_and(down, ratio <= self.dual)
        return as_float(xp.logical_or(up, down), ratio)

    def flat(self) -> list[str]:
        """See `Part`."""
        dual = f" & (ratio <= {self.dual})" if self.dual is not None else ""
        return [
            f"gate = np.where(advantage >= 0, ratio <= 1 + {self.high}, (ratio >= 1 - {self.low}){dual})",
        ]


@dataclass(frozen=True)
class Cap(Trust):
    """CISPO's bound: the ratio as a weight is cut to [low, high] (absolute values), but no decision falls silent."""

    high: float = 5.0
    low: float = 0.0
    equation: ClassVar[str] = "gate · rho = clip(rho, low, high)"
    source: ClassVar[str] = "MiniMax-M1 2025 (CISPO), eq. 4-5; Khatri et al. 2025 (ScaleRL) for high = 5"
    needs_ratio: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._require("high", self.high > 0, "more than 0 (an absolute bound on the ratio, not an offset from 1)")
        self._require("low", 0 <= self.low <= self.high, "between 0 and high")

    def gate(self, ratio: Array, advantage: Array, logp: Array, logref: Array | None, mask: Array) -> Array:
        """See `Trust`."""
        xp = array_namespace(ratio)
        tiny = float(xp.finfo(ratio.dtype).smallest_normal)
        return xp.clip(ratio, self.low, self.high) / xp.clip(ratio, min=tiny)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [f"gate = np.clip(ratio, {self.low}, {self.high}) / ratio"]


@dataclass(frozen=True)
class PairLogistic(Trust):
    """DPO's self-limiting weight: a pair pushes less the better the policy already tells its members apart.

    Groups are pairs; the sign of the advantage says which sibling was chosen. Needs `logref`.
    """

    beta: float = 0.1
    equation: ClassVar[str] = "gate = 2 beta · sigmoid(beta (h_rejected - h_chosen)),  h = sum_t log pi/pi_ref"
    source: ClassVar[str] = "Rafailov et al. 2023 (DPO), eq. 7 and the gradient below it"
    scope: ClassVar = "group"
    affine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._require("beta", self.beta > 0, "more than 0")

    def gate(self, ratio: Array, advantage: Array, logp: Array, logref: Array | None, mask: Array) -> Array:
        """See `Trust`."""
        xp = array_namespace(ratio)
        assert logref is not None
        h = xp.sum(xp.where(mask, logp - logref, xp.zeros_like(logp)), axis=-1, keepdims=True)
        sign = xp.sign(xp.sum(xp.where(mask, advantage, xp.zeros_like(advantage)), axis=-1, keepdims=True))
        margin = xp.sum(sign * h, axis=1, keepdims=True)
        # Twice, because share hands each of the two siblings half of the pair's loss.
        # 1 / (1 + e^x) as a tanh, so that a wide margin saturates instead of overflowing.
        return self.beta * (1.0 - xp.tanh(self.beta * margin / 2)) + xp.zeros_like(ratio)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            "h = (mask * (logp - logref)).sum(-1, keepdims=True)",
            "margin = (np.sign((mask * advantage).sum(-1, keepdims=True)) * h).sum(1, keepdims=True)",
            f"gate = 2 * {self.beta} / (1 + np.exp({self.beta} * margin)) + 0 * logp",
        ]
