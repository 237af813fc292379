"""Compiled programs kept on disk, so that the second run of a shape starts training at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

COMPILER_OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 1}
"""For `compile`: a third less time to compile these programs than at XLA's default level, and no slower to run."""

OFF = frozenset({"off", "0", "no", "none", "false"})


def folder() -> Path | None:
    """Where compiled programs are kept: $APPORTION_CACHE if it names a folder, else apportion/xla in the user's cache.

    Returns None when APPORTION_CACHE is "off".
    """
    wanted = os.environ.get("APPORTION_CACHE", "").strip()
    if wanted.lower() in OFF:
        return None
    if wanted:
        return Path(wanted).expanduser()
    home = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(home) if home else Path.home() / ".cache") / "apportion" / "xla"


def enable() -> Path | None:
    """Turn the cache on, unless it is off, cannot be written, or JAX was already given one. Returns the folder used.

    Call before anything is compiled: what was compiled earlier in this process is not in it.
    """
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if given is not None:
        return Path(given)
    path = folder()
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(path, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    # The programs are small and many; each one not compiled again counts towards the start.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides once in a process whether it has a cache; an earlier compilation may have decided it has not.
    compilation_cache.reset_cache()
    return path
