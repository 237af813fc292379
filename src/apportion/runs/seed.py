"""The seed of a run, checked in one place."""

from __future__ import annotations

from operator import index
from typing import Any

from apportion.core.errors import ApportionError


def check_seed(seed: Any) -> int:
    """The seed as an int, NumPy's whole numbers included. Raises ApportionError for all but 0 to 2^32 - 1.

    >>> check_seed(7)
    7
    """
    try:
        number = -1 if isinstance(seed, bool) else index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**32:
        raise ApportionError(f"seed is {seed!r}; it must be a whole number from 0 to {2**32 - 1}")
    return number
