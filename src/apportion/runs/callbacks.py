"""What a caller may hang onto a run: functions or objects that hear of its start, rows, checkpoints and end.

A callback sees and may stop training; it cannot change it, so a run ends bitwise the same with callbacks as without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError


class StopTraining(Exception):
    """Raised in a callback, it ends training as returning False does: cleanly, saved, and to be gone on with."""


@dataclass(frozen=True)
class RunInfo:
    """What `on_start` is told.

    name: of method and task. folder: of the run, None for one in memory. config: what config.json holds. total: units
    of work of the whole run. step: the field of a row that counts them. rows: those logged before this session, none
    unless it is resumed. policy: gives the policy as it is now, to act with or to evaluate.
    """

    name: str
    folder: Path | None
    config: dict[str, Any] = field(repr=False)
    total: int
    step: str
    rows: list[dict[str, Any]] = field(repr=False)
    policy: Callable[[], Any] = field(repr=False)


class Callback:
    """The hooks there are; define those of interest, in a subclass or in any object.

    Each may return False, or raise `StopTraining`, to stop; returning anything else, None included, goes on.
    """

    def on_start(self, run: RunInfo) -> bool | None:
        """Before the first iteration of this session."""

    def on_row(self, row: dict[str, Any]) -> bool | None:
        """After each row of metrics.jsonl."""

    def on_checkpoint(self, path: Path) -> bool | None:
        """After each checkpoint on the disk."""

    def on_end(self, summary: dict[str, Any]) -> bool | None:
        """After the last iteration, stopped early or not."""


HOOKS = ("on_start", "on_row", "on_checkpoint", "on_end")


class Callbacks:
    """All callbacks of a run as one. A plain function is its own `on_row`. stopped: whether one of them said stop.

    >>> rows = []
    >>> both = Callbacks([rows.append, lambda row: row["return_mean"] < 475])
    >>> both("on_row", {"return_mean": 500.0})
    >>> both.stopped, rows
    (True, [{'return_mean': 500.0}])

    Raises ApportionError for what is neither a function nor an object with a hook.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self.all = list(given)
        self.stopped = False
        for each in self.all:
            if not callable(each) and not any(callable(getattr(each, hook, None)) for hook in HOOKS):
                raise ApportionError(f"callback {each!r} is no function and has none of {', '.join(HOOKS)}")

    def __call__(self, hook: str, told: Any) -> None:
        """Tell every callback; all hear it, also when one of them stops."""
        for each in self.all:
            plain = each if callable(each) and not any(hasattr(each, name) for name in HOOKS) else None
            act = plain if hook == "on_row" and plain else getattr(each, hook, None)
            try:
                self.stopped |= act is not None and act(told) is False
            except StopTraining:
                self.stopped = True
