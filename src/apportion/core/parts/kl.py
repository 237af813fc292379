"""The KL penalty: where it enters (reward or loss) and which estimator stands for it.

With x drawn from the policy and D = log pi_ref - log pi: k1 = -D, k2 = D²/2, k3 = e^D - 1 - D. They agree in value
(k1, k3 in expectation) but not in gradient: as a loss k1 has none in expectation and k3 pulls to another target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from apportion.core.arrays import Array, array_namespace
from apportion.core.parts.base import Part

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class AdaptiveBeta:
    """Proportional controller of beta: beta ← beta · (1 + clip(KL/target − 1, ±0.2) · n/horizon).

    target: KL per trajectory, nats. horizon: trajectories over which the correction acts.
    Source: Ziegler et al. 2019, section 2.2.
    """

    target: float = 6.0
    horizon: float = 10_000.0

    def __call__(self, beta: float, kl: float, n: int) -> float:
        """The next beta after n trajectories with mean KL `kl`.

        >>> round(AdaptiveBeta(target=6.0, horizon=100.0)(0.2, kl=12.0, n=10), 6)
        0.204
        """
        return beta * (1 + min(max(kl / self.target - 1, -0.2), 0.2) * n / self.horizon)


def estimate(estimator: Estimator, logp: Array, logref: Array) -> Array:
    """Value of the estimator at each decision, [N G T] nats."""
    xp = array_namespace(logp)
    d = logref - logp
    return {"k1": lambda: -d, "k2": lambda: d**2 / 2, "k3": lambda: xp.exp(d) - 1 - d}[estimator]()


@dataclass(frozen=True)
class NoKL(Part):
    """No penalty."""

    equation: ClassVar[str] = "kl = 0"
    place: ClassVar[str] = "none"
    beta: ClassVar[float] = 0.0


@dataclass(frozen=True)
class KL(Part):
    """Penalty beta times the estimator of KL(pi || pi_ref).

    place: "reward" (before credit and baseline) or "loss". beta: units of reward per nat.
    corrected: in the loss, differentiate rho · estimator instead of the estimator, which for k3 gives the gradient
        of the reverse KL. adaptive: the controller of beta, if any.
    """

    place: Literal["reward", "loss"] = "reward"
    estimator: Estimator = "k1"
    beta: float = 0.05
    corrected: bool = False
    adaptive: AdaptiveBeta | None = None
    equation: ClassVar[str] = "reward: r_t - beta k(logq, logref);  loss: w -= share · beta · dk/dlogp"
    source: ClassVar[str] = "Schulman 2020 (KL approximation); Ziegler et al. 2019; Shao et al. 2024, eq. 4"

    def __post_init__(self) -> None:
        self._require("place", self.place in ("reward", "loss"), "'reward' or 'loss'")
        self._require("estimator", self.estimator in ("k1", "k2", "k3"), "'k1', 'k2' or 'k3'")
        self._require("beta", self.beta >= 0, "0 or more")
        self._require("corrected", not self.corrected or self.place == "loss", "false unless place is 'loss'")

    def slope(self, logp: Array, logq: Array, logref: Array) -> Array:
        """Derivative of the loss term by log pi at each decision, [N G T], without beta and share.

        >>> import numpy as np
        >>> p, ref = np.log(np.array([0.5, 0.5])), np.log(np.array([0.8, 0.2]))
        >>> KL("loss", "k3").slope(p, p, ref), KL("loss", "k2").slope(p, p, ref).round(6)
        (array([-0.6,  0.6]), array([-0.470004,  0.916291]))
        """
        xp = array_namespace(logp)
        d = logref - logp
        slope = {"k1": lambda: xp.ones_like(d), "k2": lambda: -d, "k3": lambda: 1 - xp.exp(d)}[self.estimator]()
        if not self.corrected:
            return slope
        return xp.exp(logp - logq) * (estimate(self.estimator, logp, logref) + slope)

    def flat(self) -> list[str]:
        """See `Part`: the line for the reward, or those for the loss."""
        value = {"k1": "-d", "k2": "d**2 / 2", "k3": "np.exp(d) - 1 - d"}[self.estimator]
        if self.place == "reward":
            return ["d = np.where(mask, logref - logq, 0)", f"reward = reward - {self.beta} * ({value})"]
        slope = {"k1": "1", "k2": "-d", "k3": "1 - np.exp(d)"}[self.estimator]
        if self.corrected:
            slope = f"np.exp(logp - logq) * ({value} + {slope})"
        return ["d = np.where(mask, logref - logp, 0)", f"w = w - share * {self.beta} * ({slope})"]
