"""Each simulation's random stream as ten floats, so that it travels in a snapshot row like any other state."""

from __future__ import annotations

import numpy as np

from apportion.control.hosts.base import Array

WIDTH = 10
"""Four 32-bit words of PCG64's state, four of its increment, and its two words of buffered output."""

_WORDS = [32 * k for k in range(4)]
_MASK = 2**32 - 1


def generator(seed: int | None) -> np.random.Generator:
    """The generator that Gymnasium makes from a seed (``gymnasium.utils.seeding.np_random``); None draws one."""
    return np.random.Generator(np.random.PCG64(seed))


def pack(source: np.random.Generator) -> Array:
    """State of a PCG64 generator, float64 ``[10]``; every entry is an integer below 2^32, hence exact and finite."""
    raw = source.bit_generator.state
    words = [raw["state"][key] >> shift & _MASK for key in ("state", "inc") for shift in _WORDS]
    return np.array([*words, raw["has_uint32"], raw["uinteger"]], np.float64)


def packs(source: np.random.Generator) -> bool:
    """Whether `pack` can hold it: Gymnasium's generators are PCG64, an environment may have another."""
    return source.bit_generator.state["bit_generator"] == "PCG64"


def unpack(row: Array) -> np.random.Generator:
    """The generator that `pack` saw.

    >>> first = generator(7)
    >>> second = unpack(pack(first))
    >>> first.random() == second.random()
    True
    """
    words = [int(word) for word in row]
    state, inc = (
        sum(word << shift for word, shift in zip(part, _WORDS, strict=True)) for part in (words[:4], words[4:8])
    )
    source = np.random.PCG64(0)
    source.state = {
        "bit_generator": "PCG64",
        "state": {"state": state, "inc": inc},
        "has_uint32": words[8],
        "uinteger": words[9],
    }
    return np.random.Generator(source)
