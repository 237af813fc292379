"""What turns the gradient into a step, and the gradients that have no (q, w) form: value regression and entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from apportion.core.arrays import array_namespace
from apportion.core.parts.base import Part


@dataclass(frozen=True)
class Adam(Part):
    """Adam on the (optionally norm-clipped) gradient.

    learning_rate: per update. anneal: its path over the run, "constant", "linear" or "cosine" (to final_fraction).
    max_grad_norm: global norm above which the gradient is scaled down; None for never.
    """

    learning_rate: float = 3e-4
    anneal: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = 0.0
    max_grad_norm: float | None = None
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    equation: ClassVar[str] = "theta += lr · m / (sqrt(v) + eps)"
    source: ClassVar[str] = "Kingma & Ba 2015"

    def __post_init__(self) -> None:
        self._require("learning_rate", self.learning_rate > 0, "more than 0")
        self._require("anneal", self.anneal in ("constant", "linear", "cosine"), "constant, linear or cosine")
        self._require("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm > 0, "more than 0, or None")

    def rate(self, done: Any) -> Any:
        """Learning rate after the fraction `done` of the run, 0 to 1, a float or an array [].

        >>> Adam(1e-3, anneal="linear", final_fraction=0.1).rate(0.5)
        0.00055
        """
        if self.anneal == "constant":
            return self.learning_rate
        cos = math.cos if isinstance(done, float) else array_namespace(done).cos
        path = 1.0 - done if self.anneal == "linear" else 0.5 * (1 + cos(math.pi * done))
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * path)


@dataclass(frozen=True)
class NaturalGradient(Part):
    """TRPO's step: the natural gradient, scaled to the KL region, then a backtracking line search.

    delta: mean KL allowed (nats). iterations, damping: of the conjugate gradient. backtracks, shrink: of the search.
    """

    delta: float = 0.01
    iterations: int = 10
    damping: float = 0.1
    backtracks: int = 10
    shrink: float = 0.8
    equation: ClassVar[str] = "theta += sqrt(2 delta / g'F⁻¹g) F⁻¹g, backtracked until KL <= delta and gain > 0"
    source: ClassVar[str] = "Schulman et al. 2015 (TRPO), appendix C"

    def __post_init__(self) -> None:
        self._require("delta", self.delta > 0, "more than 0")
        self._require("iterations", self.iterations >= 1, "1 or more")
        self._require("damping", self.damping >= 0, "0 or more")
        self._require("shrink", 0 < self.shrink < 1, "between 0 and 1")


@dataclass(frozen=True)
class ValueLoss(Part):
    """Regression of the critic onto the lambda-return: coefficient · (V - C)²/2, optionally clipped around the old V.

    learning_rate: of the critic alone (its own optimiser, as TRPO needs); None shares the policy's.
    """

    coefficient: float = 0.5
    clip: float | None = None
    learning_rate: float | None = None
    equation: ClassVar[str] = "loss += c · mean (V - C)² / 2"
    source: ClassVar[str] = "Schulman et al. 2017 (PPO), eq. 9"

    def __post_init__(self) -> None:
        self._require("coefficient", self.coefficient > 0, "more than 0")
        self._require("clip", self.clip is None or self.clip > 0, "more than 0, or None")
