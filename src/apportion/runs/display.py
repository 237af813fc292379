"""What a person sees of a run, and how they stop it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PLAIN_SECONDS = 5.0
"""Time between two lines of progress where there is no terminal."""


class Interrupt:
    """Holds the first SIGINT back until the iteration is whole; a second one interrupts at once."""

    def __init__(self) -> None:
        self.caught = False
        self._old: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGINT, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _catch(self, *_: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = True


def say_stopped(at: str, folder: Path) -> None:
    """Tell that a run stands still at that place, and how to go on with it."""
    print(f"apportion: stopped at {at}, saved in {folder}; repeat with --resume to go on", file=sys.stderr)


SIGNALS = {
    "return": ("return_mean", ".2f"),
    "loss": ("loss", ".3g"),
    "evaluated": ("eval_return_mean", ".2f"),
    "right": ("eval_accuracy", ".1%"),
    "kl": ("kl", ".2g"),
    "clip": ("clip_fraction", ".2f"),
    "entropy": ("entropy", ".2f"),
    "explained": ("explained_variance", ".2f"),
}
"""What is shown of a log row: its field and its format. Rows lack what their method has not."""


class Display:
    """Progress on standard error: two live lines on a terminal, a line every few seconds elsewhere, nothing when quiet.

    The first line has the steps, their rate and the time left, the second the signals of the latest log row.

    total: units of work of the whole run; unit: their name. at_first: what goes on before the first of them is done.
    """

    def __init__(
        self, title: str, total: int, unit: str = "steps", quiet: bool = False, at_first: str = "compiling"
    ) -> None:
        self.title, self.total, self.unit, self.at_first = title, total, unit, at_first
        self.live = not quiet and sys.stderr.isatty()
        self.plain = not quiet and not self.live
        self.signals = ""
        self._latest: dict[str, str] = {}
        self._bar: Any = None
        self._begun: tuple[float, int] | None = None
        self._said = time.perf_counter()

    def __enter__(self) -> Display:
        if self.live:
            from rich import progress
            from rich.console import Console, Group
            from rich.live import Live
            from rich.text import Text

            columns = (progress.BarColumn(None), progress.TextColumn("{task.fields[text]}"))
            self._bar = progress.Progress(progress.TextColumn(self.title), *columns, expand=True)
            self._task = self._bar.add_task("", total=None, text=self.at_first)
            self._line = Text()
            self._live = Live(Group(self._bar, self._line), console=Console(stderr=True), refresh_per_second=5)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._live.stop()

    def row(self, row: dict[str, Any]) -> None:
        """Take the signals of a log row."""
        new = {k: f"{k} {row[name]:{form}}" for k, (name, form) in SIGNALS.items() if row.get(name) is not None}
        self._latest |= new  # a row in which no episode ended has no return
        self.signals = "  ".join(self._latest.values())

    @property
    def shows(self) -> bool:
        """Whether anybody sees what is shown."""
        return self.live or self.plain

    def show(self, table: Any) -> None:
        """Print something of rich's above the progress."""
        from rich.console import Console

        console = self._live.console if self._bar is not None else Console(stderr=True)
        console.print(table)

    def at(self, done: int, doing: str = "") -> None:
        """Say that so many units of work are done, and what goes on beside them."""
        now = time.perf_counter()
        if self._begun is None:
            self._begun = (now, done)
        rate = (done - self._begun[1]) / max(now - self._begun[0], 1e-9)
        pace = f"{rate:,.0f}/s" if rate >= 10 else f"{1 / rate:.2g} s each" if rate else ""
        speed = f"{pace}  {max(self.total - done, 0) / rate:.0f} s left" if rate else ""
        text = "  ".join(filter(None, (f"{done:,}/{self.total:,} {self.unit}", speed, doing)))
        if self._bar is not None:
            self._line.plain = self.signals
            self._bar.update(self._task, completed=min(done, self.total), total=self.total, text=text)
        elif self.plain and now - self._said >= PLAIN_SECONDS:
            self._said = now
            print("  ".join(filter(None, (f"{self.title}: {text}", self.signals))), file=sys.stderr, flush=True)
