"""A study from plan to report: everything is checked before anything runs, and every step can be taken up again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError
from apportion.runs.files import write_json
from apportion.runs.folder import locked
from apportion.study import cells, estimate
from apportion.study.cluster import run_ray
from apportion.study.design import Cell, Study
from apportion.study.files import claim, load_modules
from apportion.study.local import run_local
from apportion.study.publish import METHODS, TUNING, write
from apportion.study.tuning import Setting, pick
from apportion.study.watch import View

BACKGROUND = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import apportion.cli.__main__"
"""The command line, to be interrupted by SIGINT also where a shell started everything with it ignored."""


def check(study: Study) -> None:
    """Build every run of the study without running it. Raises ApportionError for the first that cannot run."""
    load_modules(study.imports)
    seen = set()
    for cell in (*study.cells(), *study.tuning_cells()):
        if (key := (cell.arm, cell.task, repr(cell.settings))) not in seen:
            seen.add(key)
            cells.check(cell)


def run(
    study: Study,
    out: str | os.PathLike[str],
    workers: int | None = None,
    ray: str | None = None,
    source: str | None = None,
    quiet: bool = False,
) -> Path:
    """Run the study in a folder, or go on with it, and write its report; returns the report's path.

    workers: processes on this machine, None for one a core. ray: the address of a cluster to run on instead. source:
    the text of the study's file, kept beside the results. quiet: no progress on standard error.

    Raises ApportionError, with nothing started, for what a task cannot run, a folder of another study or one in use.
    """
    out = Path(out)
    check(study)
    with locked(out):
        claim(out, study, source)
        describe_methods(study, out)

        def through(todo: Sequence[Cell]) -> None:
            left = [c for c in todo if cells.state(out / c.folder).get("state") not in cells.OVER]
            _run(left, out, workers or os.cpu_count() or 1, ray, View(out, todo, quiet))

        if study.tuning is None:
            through(study.cells())
        trials, order = study.tuning_cells(), [a.label for a in study.arms]
        told: list[dict[str, Any]] = []
        for task in study.tasks if study.tuning else ():  # a task's results before the next task's trials
            through(mine := [c for c in trials if c.task == task])
            chosen, rows = choose(study, out, task, mine)
            told = sorted(told + rows, key=lambda one: order.index(one["arm"]))
            write_json(out / TUNING, {"rule": "largest mean area under the training curve", "arms": told})
            through(study.cells(chosen))
    return write(out)


def _run(todo: Sequence[Cell], out: Path, workers: int, ray: str | None, view: View) -> None:
    if not todo:
        return
    over: Iterator[Cell | None] = run_local(todo, out, workers) if ray is None else run_ray(todo, out, ray)
    with view:
        for cell in over:
            view.tick(cell)


def choose(
    study: Study, out: Path, task: str, trials: Sequence[Cell]
) -> tuple[dict[tuple[str, str], tuple[Setting, ...]], list[dict[str, Any]]]:
    """What the rule picks on a task from its trials, by (arm, task); and what tuning.json tells of it, arm by arm.

    An arm whose trials did not all end (a failed run) gets no pick: a smaller budget would not be fair.
    """
    from apportion.study.table import area

    assert study.tuning is not None
    chosen, told, unit = {}, [], study.budget[task].unit
    for arm in study.arms:
        settings = study.tuning.drawn(arm.label, arm.tune)
        runs = [[c for c in trials if (c.arm, c.trial) == (arm.label, k)] for k in range(len(settings))]
        if any(cells.state(out / c.folder).get("state") not in cells.OVER for trial in runs for c in trial):
            print(f"apportion: warning: {arm.label} on {task}: a tuning run failed; not compared", file=sys.stderr)
            continue
        areas = [[area(out / c.folder, c.budget) for c in trial] for trial in runs]
        best = pick(areas)
        chosen[arm.label, task] = settings[best]
        each = [{"settings": _text(s), "areas": a} for s, a in zip(settings, areas, strict=True)]
        spent = sum(cells.spent(out / c.folder, unit) for trial in runs for c in trial)
        told.append({"arm": arm.label, "task": task, "picked": best, unit: spent, "trials": each})
    return chosen, told


def _text(settings: Sequence[Setting]) -> dict[str, str]:
    return {path: repr(value) for path, value in settings}


def detach(file: str, out: Path, workers: int | None, ray: str | None) -> int:
    """Run a study file or preset in a process of its own that outlives this one; returns its id. It tells log.txt."""
    words = [sys.executable, "-c", BACKGROUND, "study", file, "--out", str(out)]
    words += ["--workers", str(workers)] if workers else []
    words += ["--ray", ray] if ray else []
    with open(out / cells.LOG, "ab") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid


def describe_methods(study: Study, out: Path) -> None:
    """Write methods.json, once: the card and the exact audit of each arm's method as the first task runs it."""
    if (out / METHODS).exists():
        return
    from apportion.audit.report import audit
    from apportion.study.card import card

    told = {}
    first = {c.arm: c for c in reversed(study.cells()) if c.task == study.tasks[0]}
    for arm in study.arms:
        method = cells.domain(first[arm.label].budget).method(first[arm.label])
        try:
            found = audit(method).lines()
        except ApportionError as error:
            found = f"not audited: {error}"
        if method.sampler.start == "independent" and method.scope == "group":
            found += "\n  note: here siblings start apart; the audit gives the siblings of a group one prompt"
        told[arm.label] = {"name": method.name, "card": card(method), "audit": found}
    write_json(out / METHODS, told)


def printed_plan(study: Study, workers: int) -> str:
    """The plan in words: runs, steps, and about how much time and disk they take."""
    todo = [*study.tuning_cells(), *study.cells()]
    return estimate.text(study, todo, workers)
