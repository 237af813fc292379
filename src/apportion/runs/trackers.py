"""Experiment trackers as callbacks: TensorBoard, Weights & Biases, Trackio.

What a tracker already holds of a run stands in the run's folder (trackers.json). A resumed run goes on in the same
tracked run from its next row on, and one that is tracked only from now on is told its earlier rows first. The count is
written after the row is handed over: a kill in between may hand one row over twice, the same values at the same step.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import uuid
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from apportion.core.errors import ApportionError, ApportionWarning, UnknownName
from apportion.runs.callbacks import Callback, RunInfo
from apportion.runs.files import read_json, write_json

STATE = "trackers.json"
PROJECT = "apportion"


def needed(package: str, install: str) -> Any:
    """The package, imported. Raises ApportionError with the pip command where it is missing or broken."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ApportionError(f"{package} cannot be imported ({error}); {install}") from None


class Tracker(Callback):
    """Rows as they come, numbers only, by their step. One that fails warns once and is left alone from then on."""

    name: ClassVar[str]

    def on_start(self, run: RunInfo) -> None:
        """Open the tracked run, or the one that this run's folder names, and tell it the rows it lacks."""
        self._step, self._alive = run.step, True
        self._state = None if run.folder is None else run.folder / STATE
        mine = self._read().get(self.name, {})
        self._id, self._rows = mine.get("id", uuid.uuid4().hex[:8]), mine.get("rows", 0)
        self._seen = len(run.rows)
        self._try(lambda: self._open(run))
        for row in run.rows[self._rows :]:
            self._add(row)

    def on_row(self, row: dict[str, Any]) -> None:
        """One more row, unless it was handed over before the run was killed and went back to its checkpoint."""
        self._seen += 1
        if self._seen > self._rows:
            self._add(row)

    def on_end(self, summary: dict[str, Any]) -> None:
        """Close it."""
        self._try(self._close)

    def _add(self, row: dict[str, Any]) -> None:
        numbers = {
            name: float(x)
            for name, x in row.items()
            if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
        }
        self._try(lambda: self._tell(numbers, int(row[self._step])))
        if self._alive:
            self._rows += 1
            self._try(self._write)

    def _try(self, act: Any) -> None:
        if not self._alive:
            return
        # Whatever a third party's tracker dies of, training is worth more.
        try:
            act()
        except Exception as error:
            self._alive = False
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            warnings.warn(f"{self.name} failed ({why}); training goes on without it", ApportionWarning, stacklevel=2)

    def _read(self) -> dict[str, Any]:
        return read_json(self._state, "the trackers of a run") if self._state and self._state.exists() else {}

    def _write(self) -> None:
        if self._state is not None:
            write_json(self._state, self._read() | {self.name: {"id": self._id, "rows": self._rows}})

    def _folder(self, run: RunInfo) -> Path:
        """Where files of this tracker go: the run's folder, or runs/NAME-ID of one in memory."""
        return run.folder or Path("runs", f"{run.name.replace(' ', '-')}-{self._id}")

    @abstractmethod
    def _open(self, run: RunInfo) -> None:
        """Begin, or go on with, the tracked run `self._id`."""

    @abstractmethod
    def _tell(self, numbers: dict[str, float], step: int) -> None:
        """One row."""

    @abstractmethod
    def _close(self) -> None:
        """The last row is told."""


class TensorBoard(Tracker):
    """Event files under the run's folder, in tensorboard/: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self) -> None:
        needed("tensorboard", "pip install 'apportion[trackers]'")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer_of = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter

    def _open(self, run: RunInfo) -> None:
        self._writer = self._writer_of(str(self._folder(run) / "tensorboard"))

    def _tell(self, numbers: dict[str, float], step: int) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        self._writer.add_event(self._events.Event(step=step, summary=self._summaries.Summary(value=values)))
        self._writer.flush()

    def _close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases: offline, under the run's folder, unless WANDB_MODE or an API key says otherwise.

    A resumed offline run is a second folder with the same id; `wandb sync --id ID` uploads both as one run.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._wandb = needed("wandb", "pip install 'apportion[trackers]'")

    def _open(self, run: RunInfo) -> None:
        configured = bool(os.environ.get("WANDB_MODE") or self._wandb.api.api_key)
        folder = self._folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self._id,
            name=run.name,
            config=run.config,
            dir=str(folder),
            resume="allow",
            mode=None if configured else "offline",
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def _tell(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def _close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """Trackio, in its own local store (TRACKIO_DIR): `trackio show`."""

    name = "trackio"

    def __init__(self) -> None:
        self._trackio = needed("trackio", "pip install 'apportion[trackio]'")

    def _open(self, run: RunInfo) -> None:
        # It prints where to look; standard output is for what a command was asked to print.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(
                project=PROJECT,
                name=f"{run.name.replace(' ', '-')}-{self._id}",
                config=run.config,
                resume="allow",
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def _tell(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def _close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {each.name: each for each in (TensorBoard, WandB, Trackio)}


def trackers(names: str) -> list[Tracker]:
    """The trackers of a comma-separated list. Raises UnknownName, and ApportionError for a package that is missing.

    >>> trackers("tensorbord")
    Traceback (most recent call last):
    ...
    apportion.core.errors.UnknownName: unknown tracker 'tensorbord'; did you mean 'tensorboard'? Known: tensorboard, \
trackio, wandb
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in TRACKERS:
            raise UnknownName("tracker", name, TRACKERS)
    return [TRACKERS[name]() for name in dict.fromkeys(chosen)]
