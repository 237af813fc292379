"""About how long a study takes and how much disk, before it runs."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources

from apportion.study import cells as runs
from apportion.study.budgets import total
from apportion.study.design import Cell, Study

START_SECONDS = 5.0
"""A run's compilation and final evaluation, about; from the cache it is less."""


@cache
def rates() -> dict[str, float]:
    """Environment steps a second by task, of PPO on one core; what benchmarks/study/rates.py printed."""
    return tomllib.loads(resources.files("apportion.study").joinpath("rates.toml").read_text("utf-8"))


def seconds(cells: Sequence[Cell], workers: int) -> tuple[float, list[str]]:
    """Seconds with so many at once, and the tasks whose rate is not known (they are left out)."""
    known = [c for c in cells if c.task in rates()]
    total = sum(START_SECONDS + c.budget.amount / rates()[c.task] for c in known)
    longest = max((START_SECONDS + c.budget.amount / rates()[c.task] for c in known), default=0.0)
    return max(total / workers, longest), sorted({c.task for c in cells} - set(rates()))


def disk(cells: Sequence[Cell]) -> int:
    """Bytes of the run folders."""
    sizes = {(c.arm, c.task): c for c in cells}
    each = {key: runs.domain(cell.budget).disk(cell) for key, cell in sizes.items()}
    return sum(each[c.arm, c.task] for c in cells)


def duration(seconds: float) -> str:
    """Seconds in words of the right size.

    >>> duration(42), duration(3900), duration(200_000)
    ('42 s', '1 h 5 min', '2 d 7 h')
    """
    s = round(seconds)
    if s < 120:
        return f"{s} s"
    if s < 3600:
        return f"{round(s / 60)} min"
    if s < 48 * 3600:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def text(study: Study, cells: Sequence[Cell], workers: int) -> str:
    """The plan: what runs, how much of it, and about what it costs."""
    tuning = [c for c in cells if c.trial is not None]
    compared = [c for c in cells if c.trial is None]
    lines = [study.title, f"  methods  {', '.join(a.label for a in study.arms)}"]
    lines += [f"  task     {task}, {study.budget[task]} a run" for task in study.tasks]
    lines += [f"  seeds    {', '.join(map(str, study.seeds))}"]
    fewer_on = {task: own for task, own in study.task_seeds.items() if own != study.seeds}
    lines += [f"  seeds    {', '.join(map(str, own))} on {task}" for task, own in fewer_on.items()]
    fewer = [a for a in study.arms if a.seeds is not None]
    lines += [f"  seeds    {', '.join(map(str, a.seeds or ()))} of {a.label}" for a in fewer]
    if study.tuning is not None:
        t = study.tuning
        lines += [f"  tuning   {t.trials} trials of every arm on every task, seeds {', '.join(map(str, t.seeds))}"]
        lines += [f"  tuning   {len(tuning):,} runs, {total(c.budget for c in tuning)}"]
    lines += [f"  compared {len(compared):,} runs, {total(c.budget for c in compared)}"]
    time, unknown = seconds(cells, workers)
    lines += [f"  time     about {duration(time)} with {workers} at once, at PPO's rate on one core"] if time else []
    lines += [f"  time     no estimate for {', '.join(unknown)}" for _ in unknown[:1]]
    lines += [f"  disk     about {disk(cells) / 1e6:,.0f} MB"]
    return "\n".join(lines)
