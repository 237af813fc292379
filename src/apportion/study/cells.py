"""One cell of a study: run it in its folder, and read back how far it is. Domains differ in one module each."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError, Diverged, InUse
from apportion.runs.files import METRICS, TIMING, read_json, write_json
from apportion.study import control_runs, lm_runs, logs
from apportion.study.budgets import CONTROL, UNITS, Budget
from apportion.study.design import Cell
from apportion.study.files import load_modules
from apportion.study.provenance import commit, machine

STATE, LOG = "cell.json", "log.txt"
OVER = ("done", "diverged")
"""States that are never run again."""
PATIENCE = 60.0
"""Seconds to wait for a folder that a dying process may still hold."""


def domain(budget: Budget) -> Any:
    """The module that runs and reads cells with such a budget: control's or language models'."""
    return control_runs if budget.unit in CONTROL else lm_runs


def check(cell: Cell) -> None:
    """Raises ApportionError, naming arm and task, for what the task cannot run."""
    try:
        domain(cell.budget).check(cell)
    except ApportionError as error:
        raise ApportionError(f"{cell.arm} on {cell.task}: {error}") from error


def run_cell(cell: Cell, root: Path) -> str:
    """Run the cell, or go on with it, and return its state: "done", "diverged" or "failed"; nothing else is raised.

    KeyboardInterrupt passes: the run has then saved where it was.
    """
    folder = root / cell.folder
    if (found := state(folder)).get("state") in OVER:
        return str(found["state"])
    folder.mkdir(parents=True, exist_ok=True)
    sessions = found.get("sessions", 0) + 1
    mark(folder, "running", sessions, begun=time.time())
    with open(folder / LOG, "a", encoding="utf-8") as log, redirect_stderr(log):
        try:
            _train(cell, folder)
        except KeyboardInterrupt:
            mark(folder, "stopped", sessions)
            raise
        except Diverged as error:
            return mark(folder, "diverged", sessions, str(error))
        except Exception as error:
            traceback.print_exc(file=log)
            return mark(folder, "failed", sessions, " ".join(str(error).split()) or type(error).__name__)
    return mark(folder, "done", sessions)


def _train(cell: Cell, folder: Path) -> None:
    load_modules(cell.imports)
    asked = time.monotonic()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
        while True:
            try:
                domain(cell.budget).train(cell, folder)
                return
            except InUse:
                if time.monotonic() - asked > PATIENCE:
                    raise
                time.sleep(0.5)


def state(folder: Path) -> dict[str, Any]:
    """What cell.json says; nothing where there is none yet."""
    return read_json(folder / STATE, "the state of a cell") if (folder / STATE).exists() else {}


def mark(folder: Path, now: str, sessions: int | None = None, message: str = "", begun: float | None = None) -> str:
    """Write down a cell's state, and where it was run. sessions: how often it was started; None leaves it."""
    before = state(folder)
    told = {
        "state": now,
        "sessions": before.get("sessions", 0) if sessions is None else sessions,
        "message": message,
        "begun": before.get("begun") if begun is None else begun,
        "commit": commit(),
        "machine": machine(),
        "process": os.getpid(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATE, told)
    return now


def spent(folder: Path, unit: str) -> int:
    """Budget that the run in a folder has spent."""
    found = logs.rows(folder)
    return int(found[-1][UNITS[unit].counter]) if found else 0


@dataclass
class Progress:
    """How far a cell is; `poll` looks again and reads only what is new.

    done: budget spent. rate: budget a second, compilation left out. best: largest training return so far.
    """

    folder: Path
    name: str
    budget: Budget
    state: str = "waiting"
    done: int = 0
    rate: float = 0.0
    latest: float | None = None
    best: float | None = None
    message: str = ""
    _read: int = 0

    def poll(self) -> Progress:
        """Look at the files once more."""
        if self.state in OVER:
            return self
        found = state(self.folder)
        self.state, self.message = found.get("state", "waiting"), found.get("message", "")
        if self.state != "waiting":
            self._follow()
        return self

    def _follow(self) -> None:
        with suppress(OSError, ValueError), open(self.folder / METRICS, "rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() < self._read:  # cut back to a checkpoint
                self._read = 0
            file.seek(self._read)
            *whole, _ = file.read().split(b"\n")
            self._read += sum(len(line) + 1 for line in whole)
            for row in map(json.loads, whole):
                self.done, value = row[UNITS[self.budget.unit].counter], row.get("return_mean")
                if value is not None:
                    self.latest, self.best = value, value if self.best is None else max(self.best, value)
        with suppress(OSError, ValueError, IndexError):
            last = json.loads((self.folder / TIMING).read_bytes().split(b"\n")[-2])
            self.rate = self.done / max(last["seconds"] - last.get("compile_seconds", 0.0), 1e-9)
