"""The few array operations that the parts share, written against the array API standard.

Axes: N groups, G siblings in a group, T decisions in a trajectory.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, is_lazy_array

from apportion.core.errors import InvalidData

Array = Any

__all__ = [
    "Array",
    "array_namespace",
    "as_float",
    "check_finite",
    "divide",
    "exp_finite",
    "is_lazy_array",
    "mean_and_variance",
    "reverse_cumulative",
    "reverse_cumulative_max",
    "uniform",
]


def as_float(x: Array, like: Array) -> Array:
    """`x` in the floating type of `like`; booleans become 0 and 1."""
    return array_namespace(like).astype(x, like.dtype)


def divide(numerator: Array, denominator: Array) -> Array:
    """`numerator / denominator`, and 0 where the denominator is 0 (a group with nothing in it weighs nothing)."""
    xp = array_namespace(numerator, denominator)
    empty = denominator == 0
    return xp.where(empty, xp.zeros_like(numerator), numerator / xp.where(empty, 1.0, denominator))


def exp_finite(x: Array) -> Array:
    """e^x, held at a huge finite value: a gate of 0 times an overflown ratio would be NaN.

    >>> import numpy as np
    >>> exp_finite(np.array([0.0, 1000.0], np.float32)) * 0
    array([0., 0.], dtype=float32)
    """
    xp = array_namespace(x)
    return xp.exp(xp.clip(x, max=math.log(float(xp.finfo(x.dtype).max)) / 2))


def reverse_cumulative(x: Array, decay: Array) -> Array:
    """`y_t = x_t + decay_t * y_{t+1}` along the last axis, in log2(T) vector operations.

    A loop over T would be unrolled by `jit` (a thousand copies) and is slow in NumPy; doubling the window
    each round needs ten rounds for a thousand decisions and no control flow, so every library runs it.

    >>> import numpy as np
    >>> reverse_cumulative(np.array([1.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.5]))
    array([1.75, 1.5 , 1.  ])
    """
    xp = array_namespace(x, decay)
    length = x.shape[-1]
    window = 1
    total, carry = x, decay
    while window < length:
        pad = xp.zeros_like(x[..., :window])
        total = total + carry * xp.concat([total[..., window:], pad], axis=-1)
        carry = carry * xp.concat([carry[..., window:], pad], axis=-1)
        window *= 2
    return total


def reverse_cumulative_max(x: Array) -> Array:
    """Running maximum from the last element backwards: `y_t = max(x_t, x_{t+1}, ...)` along the last axis."""
    xp = array_namespace(x)
    window = 1
    while window < x.shape[-1]:
        shifted = xp.concat([x[..., window:], x[..., -window:]], axis=-1)
        x = xp.maximum(x, shifted)
        window *= 2
    return x


def uniform(x: Array, valid: Array, axis: Any) -> Array:
    """Whether all valid entries along `axis` are equal up to rounding (dimension kept).

    Exact equality of the spread with 0 fails on sums like 0.1 + 0.2 against 0.3, and the mean of equal
    float32 numbers differs from them by one rounding, which a division by a tiny spread then magnifies.
    """
    xp = array_namespace(x)
    high = xp.max(xp.where(valid, x, -math.inf), axis=axis, keepdims=True)
    low = xp.min(xp.where(valid, x, math.inf), axis=axis, keepdims=True)
    size = xp.max(xp.abs(xp.where(valid, x, 0.0)), axis=axis, keepdims=True)
    return high - low <= 8 * xp.finfo(x.dtype).eps * size


def mean_and_variance(x: Array, weight: Array, axis: Any, ddof: int) -> tuple[Array, Array]:
    """Mean and variance of the entries whose weight is 1 (not 0), along `axis` (kept); 0 where there are none.

    >>> import numpy as np
    >>> mean_and_variance(np.array([1.0, 2.0, 3.0, 9.0]), np.array([1.0, 1.0, 1.0, 0.0]), 0, ddof=1)
    (array([2.]), array([1.]))
    """
    xp = array_namespace(x)
    n = xp.sum(weight, axis=axis, keepdims=True)
    mean = divide(xp.sum(weight * x, axis=axis, keepdims=True), n)
    return mean, xp.sum(weight * (x - mean) ** 2, axis=axis, keepdims=True) / xp.clip(n - ddof, min=1.0)


def check_finite(name: str, x: Array, valid: Array, way_out: str) -> None:
    """Refuse a non-finite entry, naming its index on the axes N, G, T. Concrete arrays only (not under `jit`)."""
    xp = array_namespace(x)
    bad = xp.logical_and(xp.logical_not(xp.isfinite(x)), valid)
    if not bool(xp.any(bad)):
        return
    flat = int(xp.argmax(xp.reshape(xp.astype(bad, xp.int32), (-1,))))
    where: tuple[int, ...] = ()
    for size in reversed(x.shape):
        flat, at = divmod(flat, size)
        where = (at, *where)
    index = ", ".join(f"{axis}={at}" for axis, at in zip("ngt", where, strict=False))
    raise InvalidData(f"{name} is {float(x[where])} at [{index}]; it must be finite there; {way_out}")
