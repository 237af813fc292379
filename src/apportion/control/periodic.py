"""Evaluations while a run trains: every so many environment steps, the policy as it then is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from apportion.control.engine import Plan
from apportion.control.evaluate import evaluate_policy
from apportion.control.policy import Parameters
from apportion.core.errors import ApportionError


def check_every(every: int | None) -> int | None:
    """Environment steps between evaluations. Raises ApportionError for what is no whole number of 1 or more."""
    if every is None or (isinstance(every, int | np.integer) and not isinstance(every, bool) and every >= 1):
        return every
    raise ApportionError(
        f"eval_every is {every!r}; it must be a whole number of environment steps, 1 or more (None: never)"
    )


class Periodic:
    """Evaluates at the first log row after each multiple of `every` environment steps; never if that is None.

    Whole episodes, most likely actions, from the same start states each time, which no training sees. Nothing of
    training depends on it. episodes: of an evaluation. seed: of the run. at: environment steps of the latest row.
    seconds: spent on evaluations so far. Raises as `check_every`.
    """

    def __init__(
        self, engine: Plan, every: int | None, episodes: int, seed: int, at: int = 0, seconds: float = 0.0
    ) -> None:
        self.engine, self.every, self.episodes, self.seed = engine, check_every(every), episodes, seed
        self.at, self.seconds = at, seconds

    def look(self, row: dict[str, Any], networks: Callable[[], Parameters]) -> dict[str, Any]:
        """The row, with eval_return_mean, its 95% interval (eval_return_low and _high), eval_length_mean and
        eval_episodes if an evaluation is due. networks: gives the policy's as they were when the row ended."""
        before, self.at = self.at, row["env_steps"]
        if self.every is None or self.at // self.every == before // self.every:
            return row
        began = time.perf_counter()
        engine = self.engine
        found = evaluate_policy(engine.simulator, engine.policy, networks(), self.episodes, self.seed).summary()
        found["return_low"], found["return_high"] = found.pop("return_ci")
        self.seconds += time.perf_counter() - began
        return row | {f"eval_{name}": value for name, value in found.items()}
