"""A study while it runs: one screen with a row a cell. It only reads files, so it may come and go."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apportion.core.errors import InUse
from apportion.runs.folder import locked
from apportion.study.budgets import UNITS, recorded
from apportion.study.cells import OVER, Progress
from apportion.study.design import Cell
from apportion.study.estimate import duration
from apportion.study.files import read_record
from apportion.study.table import kept

SECONDS = 30.0
"""Between two lines of progress where there is no terminal."""
MARKS = {"done": "green", "running": "cyan", "diverged": "yellow", "failed": "red", "stopped": "yellow"}
ORDER = ("running", "failed", "diverged", "stopped", "done", "waiting")


def progress(out: Path) -> list[Progress]:
    """Every cell of the study in a folder, by its own record. Raises ApportionError where there is no study."""
    record = read_record(out)
    units, before = recorded(record), kept(out, record)
    rows = []
    for c in record["cells"]:
        budget = units[c["task"]]._replace(amount=c["budget"])
        row = Progress(out / c["folder"], _name(c["arm"], c["task"], c["seed"], c["trial"]), budget)
        if (found := before.get(c["folder"])) is not None:
            row.state, row.done = found["state"].iloc[0], c["budget"]
        rows.append(row)
    return rows


def _name(arm: str, task: str, seed: int, trial: int | None) -> str:
    return f"{arm} {task} {seed}" + ("" if trial is None else f" trial {trial}")


class Screen:
    """What there is to see of many cells; `rich` asks for it anew each time it draws."""

    def __init__(self, title: str, rows: Sequence[Progress]) -> None:
        self.title, self.rows, self._begun = title, rows, time.monotonic()
        self._first: dict[str, int] = {}

    def headline(self) -> str:
        """Counts, budget spent, rate and time left in a line."""
        counts = Counter(r.state for r in self.rows)
        told = [", ".join(f"{counts[s]} {s}" for s in ORDER if counts[s])]
        now = time.monotonic()
        for unit in UNITS:
            rows = [r for r in self.rows if r.budget.unit == unit]
            if not rows:
                continue
            done, of = sum(min(r.done, r.budget.amount) for r in rows), sum(r.budget.amount for r in rows)
            rate = (done - self._first.setdefault(unit, done)) / max(now - self._begun, 1e-9)
            left = sum(max(r.budget.amount - r.done, 0) for r in rows if r.state not in (*OVER, "failed"))
            speed = f", {_rate(rate)}, {duration(left / rate)} left" if rate > 0 and left else ""
            told.append(f"{done:,}/{of:,} {unit}{speed}")
        return "; ".join(told)

    def __rich__(self) -> Any:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        for row in self.rows:
            row.poll()
        out = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
        out.add_column("cell", no_wrap=True, overflow="ellipsis", ratio=1)
        for name in ("state", "spent", "rate", "left", "return", "best"):
            out.add_column(name, justify="right", no_wrap=True)
        most = max(os.get_terminal_size().lines - 6, 5) if sys.stderr.isatty() else 1_000
        shown = sorted(self.rows, key=lambda r: ORDER.index(r.state))[:most]
        for r in shown:
            out.add_row(*_cells(r))
        hidden = len(self.rows) - len(shown)
        more = [Text(f"and {hidden} more", style="dim")] if hidden else []
        return Group(Text(f"{self.title}: {self.headline()}"), out, *more)


def _cells(r: Progress) -> list[Any]:
    from rich.text import Text

    of = r.budget.amount
    left = duration((of - r.done) / r.rate) if r.state == "running" and r.rate and r.done < of else ""
    state = "starting" if r.state == "running" and not r.done else r.state
    numbers = ["" if x is None else f"{x:.4g}" for x in (r.latest, r.best)]
    return [
        r.name,
        Text(state, style=MARKS.get(r.state, "dim")),
        f"{min(r.done / of, 1):.0%}",
        _rate(r.rate) if r.rate else "",
        left,
        *numbers,
    ]


def _rate(rate: float) -> str:
    """Budget a second, or what each takes where that is long.

    >>> _rate(1234.5), _rate(0.8)
    ('1,234/s', '1.2 s each')
    """
    return f"{rate:,.0f}/s" if rate >= 10 else f"{1 / rate:.2g} s each"


class View:
    """Progress of a runner's own cells on standard error: the screen on a terminal, lines elsewhere."""

    def __init__(self, out: Path, todo: Sequence[Cell], quiet: bool = False) -> None:
        title = "tuning" if todo and todo[0].trial is not None else "study"
        rows = [Progress(out / c.folder, _name(c.arm, c.task, c.seed, c.trial), c.budget) for c in todo]
        self.screen, self.quiet = Screen(title, rows), quiet
        self._live: Any = None
        self._said = time.monotonic()

    def __enter__(self) -> View:
        if not self.quiet and sys.stderr.isatty():
            self._live = live(self.screen)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, over: Cell | None) -> None:
        """A moment has passed, or a cell is over."""
        now = time.monotonic()
        if self.quiet or self._live is not None or (over is None and now - self._said < SECONDS):
            return
        for row in self.screen.rows:
            row.poll()
        self._said, what = now, ""
        if over is not None:
            row = next(r for r in self.screen.rows if r.folder.as_posix().endswith(over.folder))
            what = f"{row.name} {row.state}" + (f" ({row.message})" if row.message else "") + "; "
        print(f"{self.screen.title}: {what}{self.screen.headline()}", file=sys.stderr, flush=True)


def live(screen: Screen) -> Any:
    """The screen, drawn anew every second."""
    from rich.console import Console
    from rich.live import Live

    return Live(screen, console=Console(stderr=True), refresh_per_second=1, transient=False)


def attach(out: Path) -> None:
    """Watch the study in a folder until it is over, its runner is gone, or Ctrl-C; the study does not notice."""
    screen = Screen(str(out), progress(out))
    try:
        with live(screen):
            while runs(out) and any(r.state not in OVER for r in screen.rows):
                time.sleep(1.0)
    except KeyboardInterrupt:
        print(f"apportion: {out} goes on; look again with --attach {out}", file=sys.stderr)
        return
    if any(r.state not in OVER for r in screen.rows):
        print(f"apportion: nothing runs {out} now; repeat its command to go on", file=sys.stderr)


def runs(out: Path) -> bool:
    """Whether a process holds the study's folder."""
    try:
        with locked(out):
            return False
    except InUse:
        return True
