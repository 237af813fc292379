"""Where following the exact expected update ends: a deterministic ascent, no sampling in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from apportion.audit.expectation import expected_weight, update_of
from apportion.audit.replicate import replicate, updates
from apportion.audit.tables import prepare, tabulate
from apportion.core.method import Method
from apportion.toy import policy
from apportion.toy.adam import adam_ascend, adam_start, cosine
from apportion.toy.language import Language
from apportion.toy.train import BETA, Measures, measure

STEPS, RATE, FINAL = 80, 0.3, 0.02
"""Enough for exact methods to come within 1e-4 nats of their optimum."""
DRAWN = 64
"""Groups of every prompt a step, where the expected update has no closed form."""


@dataclass(frozen=True, eq=False)
class Flow:
    """Measures (see `toy.train.measure`) at the end of an ascent, and the policy reached."""

    final: Measures
    logits: np.ndarray


def follow(
    method: Method,
    language: Language,
    *,
    group: int | None = None,
    steps: int = STEPS,
    rate: float = RATE,
    final_fraction: float = FINAL,
    callback: Callable[[int, int], None] | None = None,
) -> Flow:
    """Ascend the expected update from the reference by Adam, its rate a cosine down to `final_fraction` of `rate`."""
    method = prepare(method, group)
    logits = np.array(language.reference)
    adam = adam_start(logits)
    for step in range(1, steps + 1):
        tables = tabulate(method, language, logits)
        weight = expected_weight(method, tables, precision=1e-9, only_direction=True)  # Adam ignores the size
        if weight is None:
            g = updates(tables, replicate(method, tables, DRAWN, seed=step)).mean(axis=0)
        else:
            g = update_of(weight, method, tables)
        logits, adam = adam_ascend(logits, g, adam, rate * cosine(step, steps, final_fraction))
        if callback is not None:
            callback(step, steps)
    return Flow(measure(language, logits, policy.tilted(language, BETA)), logits)
