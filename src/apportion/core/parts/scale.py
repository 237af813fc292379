"""Scales: what the advantage is divided by. Each returns (shift, scale), both [N G T]; A = (C - b - shift) / scale."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, divide, mean_and_variance, uniform
from apportion.core.parts.base import Part
from apportion.core.parts.credit import totals
from apportion.core.rollouts import Rollouts


@dataclass(frozen=True)
class Scale(Part):
    """Base of the scale parts."""

    @abstractmethod
    def __call__(self, rollouts: Rollouts, reward: Array, advantage: Array) -> tuple[Array, Array]:
        """(shift, scale), each [N G T], from the shaped reward [N G T] and C - b [N G T]."""


@dataclass(frozen=True)
class NoScale(Scale):
    """Rewards keep their units."""

    equation: ClassVar[str] = "s = 1"

    def __call__(self, rollouts: Rollouts, reward: Array, advantage: Array) -> tuple[Array, Array]:
        """See `Scale`."""
        xp = array_namespace(advantage)
        return xp.zeros_like(advantage), xp.ones_like(advantage)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["advantage = credit - baseline"]


@dataclass(frozen=True)
class _Std(Scale):
    ddof: int = 1
    eps: float = 1e-6
    affine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._require("ddof", self.ddof in (0, 1), "0 (population) or 1 (sample)")
        self._require("eps", self.eps >= 0, "0 or more")


@dataclass(frozen=True)
class GroupStd(_Std):
    """The spread of the group's returns: easy and hard prompts weigh more than even ones, which bends the target.

    >>> import numpy as np
    >>> r = Rollouts(np.array([[[1.0], [0.0], [0.0], [0.0]]]), np.ones((1, 4, 1), bool), np.zeros((1, 4, 1)))
    >>> (GroupStd(ddof=1, eps=0)(r, r.reward, r.reward)[1]).ravel()
    array([0.5, 0.5, 0.5, 0.5])
    """

    equation: ClassVar[str] = "s = std_group(R) + eps"
    source: ClassVar[str] = "Shao et al. 2024 (DeepSeekMath), section 4.1.2"
    scope: ClassVar = "group"

    def __call__(self, rollouts: Rollouts, reward: Array, advantage: Array) -> tuple[Array, Array]:
        """See `Scale`. Equal returns, or a single scored sibling, have no spread: nothing is divided."""
        xp = array_namespace(advantage)
        total = totals(rollouts, reward)
        scored = as_float(rollouts.count, total)[..., None]
        _, square = mean_and_variance(total, scored, 1, self.ddof)
        flat = xp.logical_or(uniform(total, rollouts.count[..., None], 1), square == 0)
        std = xp.where(flat, xp.ones_like(square), xp.sqrt(square) + self.eps)
        return xp.zeros_like(advantage), std + xp.zeros_like(advantage)

    def flat(self) -> list[str]:
        """See `Part`."""
        return [
            f"std = reward.sum(-1, keepdims=True).std(1, ddof={self.ddof}, keepdims=True)",
            f"advantage = (credit - baseline) / np.where(std > 1e-15, std + {self.eps}, 1)",
        ]


@dataclass(frozen=True)
class BatchStd(_Std):
    """The spread of the advantage over all decisions of the collection ("whitening" when centred as well).

    Taken over the whole collection and before it is cut, so that the minibatch size cannot change the gradient.
    """

    center: bool = True
    equation: ClassVar[str] = "A <- (A - mean(A)) / (std(A) + eps) over the batch"
    source: ClassVar[str] = "Andrychowicz et al. 2021, section 3.5; Hu 2025 (REINFORCE++), eq. 8"
    scope: ClassVar = "batch"

    def __call__(self, rollouts: Rollouts, reward: Array, advantage: Array) -> tuple[Array, Array]:
        """See `Scale`. Fewer than two decisions, or equal advantages, are left undivided."""
        xp = array_namespace(advantage)
        valid = xp.logical_and(rollouts.mask, rollouts.count[..., None])
        m = as_float(valid, advantage)
        n = xp.sum(m)
        m = m * rollouts.probability[:, None, None]
        share = divide(m, xp.sum(m))
        mean = xp.sum(share * advantage)
        square = xp.sum(share * (advantage - mean) ** 2) * divide(n, xp.clip(n - self.ddof, min=1.0))
        axes = tuple(range(advantage.ndim))
        flat = xp.logical_or(n < 2, xp.reshape(uniform(advantage, valid, axes), ()))
        std = xp.where(flat, xp.ones_like(square), xp.sqrt(square) + self.eps)
        single = xp.where(n < 2, xp.zeros_like(mean), mean)
        shift = xp.where(flat, xp.where(n < 2, xp.zeros_like(advantage), advantage), single)
        shift = shift if self.center else xp.zeros_like(advantage)
        return shift + xp.zeros_like(advantage), std + xp.zeros_like(advantage)

    def flat(self) -> list[str]:
        """See `Part`."""
        centre = " - mean" if self.center else ""
        return [
            "m = mask * mass[:, None, None] / (mask * mass[:, None, None]).sum()",
            "mean = (m * (credit - baseline)).sum()",
            f"var = (m * (credit - baseline - mean) ** 2).sum() * mask.sum() / (mask.sum() - {self.ddof})",
            f"advantage = (credit - baseline{centre}) / (np.sqrt(var) + {self.eps})",
        ]
