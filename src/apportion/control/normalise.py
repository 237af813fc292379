"""Running statistics of observations and returns: what a run normalises by. Float64 on hosts, float32 inside jit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
"""NumPy's on hosts, JAX's inside jit."""

EPSILON = 1e-8
"""Added to a variance before its root."""


class Moments(NamedTuple):
    """Number of rows [], mean [...] and summed squared deviations from it [...] of all rows so far."""

    size: Array
    mean: Array
    m2: Array

    @property
    def variance(self) -> Array:
        """Population variance [...]; 0 before the first row."""
        return self.m2 / self.size.clip(1)

    @property
    def scale(self) -> Array:
        """What to multiply by to get unit variance, [...]; 1 before the second row, and where nothing varied."""
        xp = jnp if isinstance(self.m2, jax.Array) else np
        return xp.where(self.m2 > 0, 1 / xp.sqrt(self.variance + EPSILON), 1.0)


class Normaliser(NamedTuple):
    """Statistics of observations [O] and of the discounted return []; None where a run does not normalise."""

    observation: Moments | None = None
    reward: Moments | None = None


def nothing(shape: tuple[int, ...] = (), dtype: Any = np.float64) -> Moments:
    """The moments of no rows."""
    return Moments(np.zeros((), dtype), np.zeros(shape, dtype), np.zeros(shape, dtype))


def merged(moments: Moments, rows: Array) -> Moments:
    """The moments with `rows` [B ...] added, NumPy.

    >>> merged(merged(nothing(), np.array([1.0, 2.0])), np.array([6.0])).mean.item()
    3.0
    """
    if not len(rows):
        return moments
    mean = rows.mean(0, dtype=np.float64)
    m2 = np.square(rows - mean).sum(0, dtype=np.float64)
    return _joined(moments, Moments(np.float64(len(rows)), mean, m2))


def merged_where(moments: Moments, rows: Array, valid: Array) -> Moments:
    """The moments with those of `rows` [B ...] added where `valid` [B], inside jit."""
    weight = valid.astype(jnp.float32).reshape(-1, *(1 for _ in rows.shape[1:]))
    size = jnp.sum(valid, dtype=jnp.float32)
    mean = jnp.sum(weight * rows, 0) / size.clip(1)
    return _joined(moments, Moments(size, mean, jnp.sum(weight * (rows - mean) ** 2, 0)))


def _joined(a: Moments, b: Moments) -> Moments:
    """Moments of the rows of both (Chan, Golub & LeVeque 1983, eq. 2.1)."""
    size, shift = a.size + b.size, b.mean - a.mean
    share = b.size / size.clip(1)
    return Moments(size, a.mean + shift * share, a.m2 + b.m2 + shift**2 * a.size * share)


def statistics(normaliser: Normaliser) -> dict[str, dict[str, Array]]:
    """What the networks' parameters hold beside the trained ones: {"observed": {mean, scale [O] float32}} or {}."""
    if normaliser.observation is None:
        return {}
    seen = normaliser.observation
    return {"observed": {"mean": seen.mean.astype(np.float32), "scale": seen.scale.astype(np.float32)}}
