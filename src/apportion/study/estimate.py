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
    """Environment steps a second by task, of PPO on one core, and completions a second of language-model presets."""
    return tomllib.loads(resources.files("apportion.study").joinpath("rates.toml").read_text("utf-8"))


def rate(cell: Cell) -> float | None:
    """Budget that a cell spends a second, where it is known: of a language model, completions of a preset's model."""
    if cell.lm is None:
        return rates().get(cell.task)
    usual = cell.budget.unit == "completions" and "model" not in cell.lm
    return rates().get(str(cell.lm.get("preset"))) if usual else None


def seconds(cells: Sequence[Cell], workers: int) -> tuple[float, list[str]]:
    """Seconds with so many at once, and the tasks whose rate is not known (they are left out)."""
    each = [(c.task, rate(c), c.budget.amount) for c in cells]
    known = [START_SECONDS + amount / r for _, r, amount in each if r is not None]
    unknown = sorted({task for task, r, _ in each if r is None})
    return max(sum(known) / workers, max(known, default=0.0)), unknown


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


def _whose(cells: Sequence[Cell]) -> str:
    control, models = any(c.lm is None for c in cells), any(c.lm is not None for c in cells)
    return " and ".join(["PPO's rate"] * control + ["its preset's rate"] * models)


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
    lines += (
        [f"  time     about {duration(time)} with {workers} at once, at {_whose(cells)} on one core"] if time else []
    )
    lines += [f"  time     no estimate for {', '.join(unknown)}" for _ in unknown[:1]]
    lines += [f"  disk     about {disk(cells) / 1e6:,.0f} MB"]
    return "\n".join(lines)
