"""A study from plan to report: everything is checked before anything runs, and every step can be taken up again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError
from apportion.runs.files import read_json, write_json
from apportion.runs.folder import locked
from apportion.study import cells, estimate
from apportion.study.cluster import run_ray
from apportion.study.design import Cell, Study
from apportion.study.files import TUNING, claim, load_modules, read_record
from apportion.study.local import run_local
from apportion.study.publish import METHODS, write
from apportion.study.table import area, kept
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
        before = kept(out, read_record(out))

        def through(asked: Sequence[Cell]) -> None:
            todo = [c for c in asked if c.folder not in before]
            left = [c for c in todo if cells.state(out / c.folder).get("state") not in cells.OVER]
            _run(left, out, workers or os.cpu_count() or 1, ray, View(out, todo, quiet))

        if study.tuning is None:
            through(study.cells())
        trials, order = study.tuning_cells(), [a.label for a in study.arms]
        told = [one for one in _told(out) if any(c.folder in before for c in trials if _of(c, one))]
        for task in study.tasks if study.tuning else ():  # a task's results before the next task's trials
            through(mine := [c for c in trials if c.task == task])
            told += choose(study, out, task, mine, {one["arm"] for one in told if one["task"] == task})
            told.sort(key=lambda one: order.index(one["arm"]))
            write_json(out / TUNING, {"rule": "largest mean area under the training curve", "arms": told})
            through(study.cells(chosen(study, told, task)))
    return write(out)


def _run(todo: Sequence[Cell], out: Path, workers: int, ray: str | None, view: View) -> None:
    if not todo:
        return
    over: Iterator[Cell | None] = run_local(todo, out, workers) if ray is None else run_ray(todo, out, ray)
    with view:
        for cell in over:
            view.tick(cell)


def _told(out: Path) -> list[dict[str, Any]]:
    """What tuning.json tells so far, arm by arm and task by task."""
    return list(read_json(out / TUNING, "what tuning chose")["arms"]) if (out / TUNING).exists() else []


def _of(cell: Cell, one: Mapping[str, Any]) -> bool:
    """Whether the cell has that arm and task."""
    return (cell.arm, cell.task) == (one["arm"], one["task"])


def choose(study: Study, out: Path, task: str, trials: Sequence[Cell], known: Collection[str]) -> list[dict[str, Any]]:
    """What the rule picks on a task from its trials, as tuning.json tells it, arm by arm.

    known: arms of which it is told already. An arm whose trials did not all end (a failed run) gets no pick: a
    smaller budget would not be fair.
    """
    assert study.tuning is not None
    told, unit = [], study.budget[task].unit
    for arm in [a for a in study.arms if a.label not in known]:
        settings = study.tuning.drawn(arm.label, arm.tune)
        runs = [[c for c in trials if (c.arm, c.trial) == (arm.label, k)] for k in range(len(settings))]
        if any(cells.state(out / c.folder).get("state") not in cells.OVER for trial in runs for c in trial):
            print(f"apportion: warning: {arm.label} on {task}: a tuning run failed; not compared", file=sys.stderr)
            continue
        areas = [[area(out / c.folder, c.budget) for c in trial] for trial in runs]
        each = [{"settings": _text(s), "areas": a} for s, a in zip(settings, areas, strict=True)]
        spent = sum(cells.spent(out / c.folder, unit) for trial in runs for c in trial)
        told.append({"arm": arm.label, "task": task, "picked": pick(areas), unit: spent, "trials": each})
    return told


def chosen(study: Study, told: Sequence[Mapping[str, Any]], task: str) -> dict[tuple[str, str], tuple[Setting, ...]]:
    """The settings that were picked on a task, by (arm, task)."""
    assert study.tuning is not None
    picked = {one["arm"]: one["picked"] for one in told if one["task"] == task}
    return {
        (a.label, task): study.tuning.drawn(a.label, a.tune)[picked[a.label]] for a in study.arms if a.label in picked
    }


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
