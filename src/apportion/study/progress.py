"""Live progress of many jobs: bars with rate and time left on a terminal, a line a finished job elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Steps a second, over the last few updates; that it compiles, before the first."""
        if task.started and not task.completed:
            return Text("starting", style="dim", justify="right")
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f}/s" if speed else "", style="dim", justify="right")


class Shown:
    """The bars, one a job."""

    def __init__(self, bars: Progress, jobs: Mapping[Any, tuple[str, int]]) -> None:
        self._bars, self._started = bars, time.perf_counter()
        self._of = dict(jobs)
        self._ids: dict[Any, Any] = {
            job: bars.add_task(label, total=total, start=False) for job, (label, total) in jobs.items()
        }
        self._running: set[Any] = set()

    def update(self, job: Any, done: int, total: int) -> None:
        """So much of a job is done."""
        if job not in self._running:
            self._running.add(job)
            self._bars.start_task(self._ids[job])
        self._bars.update(self._ids[job], completed=done, total=total)

    def finish(self, job: Any) -> None:
        """The job is over."""
        label, total = self._of[job]
        self.update(job, total, total)
        if not self._bars.console.is_terminal:
            self._bars.console.print(f"{time.perf_counter() - self._started:6.1f} s  {label}")


@contextmanager
def live(jobs: Mapping[Any, tuple[str, int]]) -> Iterator[Shown]:
    """Show jobs (key -> label, size) until the block ends; the bars go to stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), expand=True) as bars:
        yield Shown(bars, jobs)
