"""Adam on one array of parameters, as a pure function, and the cosine schedule of its step size."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import numpy as np


@dataclass(frozen=True)
class AdamState:
    """Running first and second moments of the gradient, and how many steps have been taken."""

    first: np.ndarray
    second: np.ndarray
    step: int = 0


def adam_start(parameters: np.ndarray) -> AdamState:
    """The state before the first step: zero moments of the parameters' shape."""
    return AdamState(np.zeros_like(parameters), np.zeros_like(parameters))


def adam_ascend(
    parameters: np.ndarray,
    gradient: np.ndarray,
    state: AdamState,
    rate: float,
    *,
    decay: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> tuple[np.ndarray, AdamState]:
    """One bias-corrected Adam step *up* the gradient (Kingma and Ba 2015); returns new parameters and state.

    Up, because the gradient of this library is that of an objective, `sum w grad log pi`.
    """
    step = state.step + 1
    first = decay[0] * state.first + (1 - decay[0]) * gradient
    second = decay[1] * state.second + (1 - decay[1]) * gradient * gradient
    scale = np.sqrt(second / (1 - decay[1] ** step)) + epsilon
    moved = parameters + (rate / (1 - decay[0] ** step)) * first / scale
    return moved, AdamState(first, second, step)


def cosine(step: int, steps: int, final: float) -> float:
    """Factor on the step size: 1 at step 0, `final` from step `steps` on, half a cosine between.

    Step numbers count updates made *including* the one being taken, so updates run from 1 to `steps` and the
    last one is taken at exactly `final`.

    >>> cosine(0, 100, 0.02), round(cosine(100, 100, 0.02), 12)
    (1.0, 0.02)
    """
    done = min(step / steps, 1.0)
    return final + (1 - final) * 0.5 * (1 + cos(pi * done))
