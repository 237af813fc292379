"""The log of a run as it lies in its folder; whole lines only, so that a run may be read while it goes on."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from apportion.runs.files import METRICS, SUMMARY, TIMING, read_json


def rows(folder: Path) -> list[dict[str, Any]]:
    """The log rows of a run, each with the seconds it took to get there."""
    return [m | t for m, t in zip(_lines(folder / METRICS), _lines(folder / TIMING), strict=False)]


def _lines(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError):
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return []


def summary(folder: Path) -> dict[str, Any] | None:
    """What summary.json holds, or None before the run's end."""
    return read_json(folder / SUMMARY, "the summary of a run") if (folder / SUMMARY).exists() else None
