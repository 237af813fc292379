"""Memory that is free but not given back."""

from __future__ import annotations

import ctypes
import sys


def release() -> None:
    """Give the system what the C library holds on to; nothing where that is not glibc.

    It keeps freed blocks of up to 32 MiB, and the tensors of the next batch do not fit where the last one's were: a
    process that trains would grow by a third beyond what it uses.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
