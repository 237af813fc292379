"""Importance ratios between the policy and the sampler, and how a loss of the ratio reaches each decision.

`ratio` is [N G T]; `pool` turns share·A·gate [N G T] into the factor of grad log pi at each decision,
which for a ratio of the whole sequence gathers the sequence's weights first.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from apportion.core.arrays import Array, array_namespace, as_float, divide, exp_finite
from apportion.core.parts.base import Part


@dataclass(frozen=True)
class Ratio(Part):
    """Base of the ratio parts. `per_sequence`: needs whole trajectories (minibatches must not cut them)."""

    per_sequence: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, logp: Array, logq: Array, mask: Array) -> Array:
        """Importance ratio [N G T] from log-probabilities (nats) of policy and sampler."""

    def pool(self, weight: Array, ratio: Array, mask: Array) -> Array:
        """Derivative of sum(weight · ratio) by log pi at each decision, [N G T]."""
        return weight * ratio


@dataclass(frozen=True)
class NoRatio(Ratio):
    """The sample is taken as the policy's own."""

    equation: ClassVar[str] = "rho = 1"

    def __call__(self, logp: Array, logq: Array, mask: Array) -> Array:
        """See `Ratio`."""
        return array_namespace(logp).ones_like(logp)

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["ratio = np.ones_like(logp)"]


@dataclass(frozen=True)
class DecisionRatio(Ratio):
    """One ratio a decision."""

    equation: ClassVar[str] = "rho_t = pi(a_t|s_t) / q(a_t|s_t)"
    source: ClassVar[str] = "Schulman et al. 2017 (PPO), eq. 6"

    def __call__(self, logp: Array, logq: Array, mask: Array) -> Array:
        """See `Ratio`. 1 where masked."""
        xp = array_namespace(logp)
        return exp_finite(xp.where(mask, logp - logq, xp.zeros_like(logp)))

    def flat(self) -> list[str]:
        """See `Part`."""
        return ["ratio = np.exp(np.where(mask, logp - logq, 0))"]


def _sequence(logp: Array, logq: Array, mask: Array, geometric: bool) -> Array:
    xp = array_namespace(logp)
    total = xp.sum(xp.where(mask, logp - logq, xp.zeros_like(logp)), axis=-1, keepdims=True)
    if geometric:
        total = divide(total, xp.sum(as_float(mask, logp), axis=-1, keepdims=True))
    return exp_finite(total) + xp.zeros_like(logp)


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """One ratio a trajectory.

    geometric: the geometric mean over decisions, a biased surrogate; false is the product, the true importance
        weight, whose spread grows with the length.
    """

    geometric: bool = True
    equation: ClassVar[str] = "s = exp(mean_t log rho_t), or exp(sum_t log rho_t) when not geometric"
    source: ClassVar[str] = "Zheng et al. 2025 (GSPO), eq. 7"
    per_sequence: ClassVar[bool] = True

    def __call__(self, logp: Array, logq: Array, mask: Array) -> Array:
        """See `Ratio`.

        >>> import numpy as np
        >>> steps, zero, mask = np.full((1, 1, 100), -0.01), np.zeros((1, 1, 100)), np.ones((1, 1, 100), bool)
        >>> [round(float(SequenceRatio(geometric=g)(steps, zero, mask)[0, 0, 0]), 7) for g in (True, False)]
        [0.9900498, 0.3678794]
        """
        return _sequence(logp, logq, mask, self.geometric)

    def pool(self, weight: Array, ratio: Array, mask: Array) -> Array:
        """See `Ratio`. The whole trajectory moves its one ratio, so all decisions share the summed weight."""
        xp = array_namespace(weight)
        m = as_float(mask, weight)
        together = xp.sum(weight * m, axis=-1, keepdims=True) * ratio * m
        return divide(together, xp.sum(m, axis=-1, keepdims=True)) if self.geometric else together

    def flat(self) -> list[str]:
        """See `Part`."""
        length = " / np.maximum(mask.sum(-1, keepdims=True), 1)" if self.geometric else ""
        return [f"ratio = np.exp((mask * (logp - logq)).sum(-1, keepdims=True){length}) + 0 * logp"]

    def flat_pool(self) -> list[str]:
        """The lines that gather a trajectory's weights."""
        length = " / np.maximum(mask.sum(-1, keepdims=True), 1)" if self.geometric else ""
        return [f"w = mask * ratio * (mask * share * advantage * gate).sum(-1, keepdims=True){length}"]


@dataclass(frozen=True)
class SequenceDecisionRatio(Ratio):
    """GSPO-token: the value of the sequence's ratio, the gradient of the decision's own log-probability."""

    equation: ClassVar[str] = "s_t = sg[s] · pi(a_t|s_t) / sg[pi(a_t|s_t)]"
    source: ClassVar[str] = "Zheng et al. 2025 (GSPO), eq. 14"
    per_sequence: ClassVar[bool] = True

    def __call__(self, logp: Array, logq: Array, mask: Array) -> Array:
        """See `Ratio`."""
        return _sequence(logp, logq, mask, geometric=True)

    def flat(self) -> list[str]:
        """See `Part`."""
        return SequenceRatio().flat()
