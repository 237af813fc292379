"""Running statistics of observations and returns, float64 NumPy: what a host run normalises by."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EPSILON = 1e-8
"""Added to a variance before its root."""


class Moments(NamedTuple):
    """Number of rows [], mean [...] and summed squared deviations from it [...] of all rows so far; float64."""

    size: Array
    mean: Array
    m2: Array

    @property
    def variance(self) -> Array:
        """Population variance [...]; 0 before the first row."""
        return self.m2 / np.maximum(self.size, 1)

    @property
    def scale(self) -> Array:
        """What to multiply by to get unit variance, [...]; 1 before the second row, and where nothing varied."""
        return np.where(self.m2 > 0, 1 / np.sqrt(self.variance + EPSILON), 1.0)


class Normaliser(NamedTuple):
    """Statistics of observations [O] and of the discounted return []; None where a run does not normalise."""

    observation: Moments | None
    reward: Moments | None


def nothing(shape: tuple[int, ...] = ()) -> Moments:
    """The moments of no rows."""
    return Moments(np.zeros(()), np.zeros(shape), np.zeros(shape))


def merged(moments: Moments, rows: Array) -> Moments:
    """The moments with `rows` [B ...] added (Chan, Golub & LeVeque 1983, eq. 2.1).

    >>> merged(merged(nothing(), np.array([1.0, 2.0])), np.array([6.0])).mean.item()
    3.0
    """
    if not len(rows):
        return moments
    mean = rows.mean(0, dtype=np.float64)
    m2 = np.square(rows - mean).sum(0, dtype=np.float64)
    size, shift = moments.size + len(rows), mean - moments.mean
    share = len(rows) / size
    return Moments(size, moments.mean + shift * share, moments.m2 + m2 + shift**2 * moments.size * share)


def statistics(normaliser: Normaliser | None) -> dict[str, dict[str, Array]]:
    """What the networks' parameters hold beside the trained ones: {"observed": {mean, scale [O] float32}} or {}."""
    if normaliser is None or normaliser.observation is None:
        return {}
    seen = normaliser.observation
    return {"observed": {"mean": seen.mean.astype(np.float32), "scale": seen.scale.astype(np.float32)}}
