"""Where following the exact expected update ends: a deterministic ascent, no sampling in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.audit import enumeration
from apportion.audit.expectation import expected_weight, update_of
from apportion.audit.replicate import replicate, updates
from apportion.audit.tables import prepare, tabulate
from apportion.core.method import Method
from apportion.toy import policy
from apportion.toy.adam import adam_ascend, adam_start, cosine
from apportion.toy.collect import BETA, Measures
from apportion.toy.language import Language
from apportion.toy.train import measure

LONG, SHORT = (300, 0.1), (80, 0.3)
"""Steps and rate; the short one too brings exact methods within 1e-4 nats of their optimum."""
FINAL = 0.02
DRAWN = 64
"""Groups of every prompt a step, where the expected update has no closed form."""


@dataclass(frozen=True, eq=False)
class Flow:
    """Measures (see `toy.train.measure`) along an ascent, with their step, and the policy reached."""

    rows: tuple[Measures, ...]
    logits: np.ndarray

    @property
    def final(self) -> Measures:
        """The last row."""
        return self.rows[-1]


def schedule(method: Method, language: Language) -> tuple[int, float]:
    """Steps and rate for a target in about a second: fewer where a step enumerates the siblings of every response."""
    slow = enumeration.compares(method) and enumeration.shaped(method)
    return SHORT if slow or language.name != "toy" else LONG


def follow(
    method: Method,
    language: Language,
    *,
    group: int | None = None,
    steps: int = LONG[0],
    rate: float = LONG[1],
    final_fraction: float = FINAL,
    every: int | None = None,
) -> Flow:
    """Ascend the expected update from the reference by Adam, its rate a cosine down to `final_fraction` of `rate`.

    every: steps between measurements; None measures the end alone.
    """
    method = prepare(method, group)
    optimum, rows = policy.tilted(language, BETA), []
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
        if step == steps or (every is not None and step % every == 0):
            rows.append({"step": float(step)} | measure(language, logits, optimum))
    return Flow(tuple(rows), logits)
