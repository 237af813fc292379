"""The published figures of the toy language, reproduced into one table and one page.

Expectations (1, 2, 5 to 8, and the exact roads of 4) are computed as sums; 3 and 4 are training runs by definition.
Every number goes through a catalogue method, or a variant of one, and the same weights that training uses.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from apportion.audit.figures import exact, runs
from apportion.audit.figures.page import page
from apportion.audit.figures.rows import Figure, Row, comma_separated, markdown, table
from apportion.audit.figures.runs import Job, Results
from apportion.toy.collect import Measures

__all__ = ["Row", "figures", "jobs", "passed", "reproduce", "table"]

Progress = Callable[[int, int, float], None]
PROCESSES = 2


def jobs() -> list[Job]:
    """Every run that the figures need, the longest first."""
    return [*runs.road_jobs(), *runs.placement_jobs(), *runs.length_jobs()]


def bar(done: int, total: int, seconds: float) -> None:
    """A progress bar on stderr: runs done, rate, time left."""
    rate = done / seconds if seconds > 0 else 0.0
    left = (total - done) / rate if rate else 0.0
    filled = 30 * done // total
    text = f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total} runs  {rate:.2f} runs/s  {left:3.0f} s left "
    sys.stderr.write(text + ("\n" if done == total else ""))
    sys.stderr.flush()


def collect(work: Sequence[Job], progress: Progress | None = None, processes: int = PROCESSES) -> Results:
    """The rows of every job, by figure and name, in the order of the seeds."""
    start, found = time.monotonic(), [tuple[Measures, ...]() for _ in work]
    # Spawned, not forked: the caller may hold threads.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(runs.run, job): i for i, job in enumerate(work)}
        for done, future in enumerate(as_completed(pending), 1):
            found[pending[future]] = future.result()
            if progress is not None:
                progress(done, len(work), time.monotonic() - start)
    results: dict[tuple[int, str], list[tuple[Measures, ...]]] = {}
    for job, rows in zip(work, found, strict=True):
        results.setdefault((job.figure, job.name), []).append(rows)
    return results


def reproduce(progress: Progress | None = None) -> list[Figure]:
    """All eight figures."""
    results = collect(jobs(), progress)
    return [
        exact.zero_signal(),
        exact.difficulty_weight(),
        runs.length_bias(results),
        runs.all_roads(results),
        runs.placement(results),
        exact.two_actions(),
        exact.groups(),
        exact.variance_by_baseline(),
    ]


def figures(out: Path, progress: Progress | None = None) -> list[Row]:
    """Reproduce the figures; write `figures.md`, `figures.csv` and `figures.html` into `out`; return the table's rows.

    progress: called with (runs done, runs in all, seconds so far); None draws a bar on a terminal.
    """
    if progress is None and sys.stderr.isatty():
        progress = bar
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    made = reproduce(progress)
    rows = [row for f in made for row in f.rows]
    for name, text in (("md", markdown(rows)), ("csv", comma_separated(rows)), ("html", page(made))):
        (out / f"figures.{name}").write_text(text, encoding="utf-8")
    return rows


def passed(rows: Sequence[Row]) -> bool:
    """Whether no row is out of tolerance (corrections do not count)."""
    return all(row.within is not False for row in rows)
