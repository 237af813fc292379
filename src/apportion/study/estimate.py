"""About how long a study takes and how much disk, before it runs."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources

from apportion.study.design import Cell, Study

START_SECONDS = 5.0
"""A run's compilation and final evaluation, about; from the cache it is less."""
LOG_BYTES = 120_000
"""metrics.jsonl, timing.jsonl and the small files of a run, about."""


@cache
def rates() -> dict[str, float]:
    """Environment steps a second by task, of PPO on one core; what benchmarks/study/rates.py printed."""
    return tomllib.loads(resources.files("apportion.study").joinpath("rates.toml").read_text("utf-8"))


def seconds(cells: Sequence[Cell], workers: int) -> tuple[float, list[str]]:
    """Seconds with so many at once, and the tasks whose rate is not known (they are left out)."""
    known = [c for c in cells if c.task in rates()]
    total = sum(START_SECONDS + c.budget / rates()[c.task] for c in known)
    longest = max((START_SECONDS + c.budget / rates()[c.task] for c in known), default=0.0)
    return max(total / workers, longest), sorted({c.task for c in cells} - set(rates()))


def disk(cells: Sequence[Cell]) -> int:
    """Bytes of the run folders: a policy, a checkpoint with Adam's two moments, and the logs."""
    from apportion.control.checkpoint import networks_template, size
    from apportion.control.train import prepare

    def parameters(cell: Cell) -> int:
        policy = prepare(cell.method, cell.task, cell.budget, cell.settings).policy
        return size(networks_template(policy))

    sizes = {(c.arm, c.task): c for c in cells}
    each = {key: 16 * parameters(cell) + LOG_BYTES for key, cell in sizes.items()}
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
    lines += [f"  task     {task}, {study.steps[task]:,} environment steps a run" for task in study.tasks]
    lines += [f"  seeds    {', '.join(map(str, study.seeds))}"]
    if study.tuning is not None:
        t = study.tuning
        lines += [f"  tuning   {t.trials} trials of every arm on every task, seeds {', '.join(map(str, t.seeds))}"]
        lines += [f"  tuning   {len(tuning):,} runs, {sum(c.budget for c in tuning):,} environment steps"]
    lines += [f"  compared {len(compared):,} runs, {sum(c.budget for c in compared):,} environment steps"]
    time, unknown = seconds(cells, workers)
    lines += [f"  time     about {duration(time)} with {workers} at once, at PPO's rate on one core"]
    lines += [f"  time     no estimate for {', '.join(unknown)}" for _ in unknown[:1]]
    lines += [f"  disk     about {disk(cells) / 1e6:,.0f} MB"]
    return "\n".join(lines)
