"""Where a number comes from: the commit of the code and the class of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import apportion


@cache
def commit() -> str:
    """The commit of the running code, "+changes" if files differ from it; the version where it is no checkout."""
    folder = Path(apportion.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return f"version {apportion.__version__}"


@cache
def machine() -> str:
    """Its class: system, architecture, processors and their model; not its name.

    >>> platform.machine() in machine()
    True
    """
    model = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {model or 'unknown processor'}"
