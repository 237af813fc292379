"""A run of a language model: in memory, or in a folder that says everything about it and can be gone on with.

Killed at any moment, the folder can be gone on with, and on a CPU its metrics and weights end up bitwise the same.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.lm import checkpoint, models
from apportion.lm.collect import Batch
from apportion.lm.evaluate import MODEL
from apportion.lm.job import Job, prepare
from apportion.lm.loop import EVERY, Loop
from apportion.lm.models import LanguageModel
from apportion.lm.samples import records, table
from apportion.runs.callbacks import Callbacks, RunInfo
from apportion.runs.display import Display, Interrupt, say_stopped
from apportion.runs.files import METRICS, SUMMARY, TIMING, read_json, write_json
from apportion.runs.folder import claim, described, locked, versions
from apportion.runs.lines import Lines, timing

CHECKPOINT_SECONDS = 300.0
"""Least time between two checkpoints: one writes the weights and twice as much again for the optimiser."""
SAMPLES = "samples.jsonl"


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run. summary: what `summary.json` holds. metrics: the log rows of this process. out: its folder."""

    method: Method
    language_model: LanguageModel = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any]
    out: Path | None = None


def train(
    method: Method | str,
    *,
    preset: str | None = None,
    seed: int = 0,
    overrides: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Run:
    """Train a language model by a method, and return the run.

    settings: fields of `setup.Setup`: model, data, reward, prompts, max_tokens, steps, eval_data and so on. preset: a
    name in presets.toml that fills in what is not given. overrides: fields of the method by path, such as
    ("update.learning_rate", 1e-6). out: the run's folder; None leaves nothing on the disk. resume: go on with the run
    that the folder holds, or begin if it holds none. quiet: no progress on standard error. callbacks: see
    `runs.callbacks`; a run that one of them stopped has no summary.json yet, and resume goes on with it.

    Raises ApportionError for what does not exist or fit, a folder that already holds a run (unless resume), a run of
    another configuration, a folder in use, a full disk, rewards that all failed, and a gradient that is not finite. At
    SIGINT it saves and raises KeyboardInterrupt.

        run = lm.train(methods.dr_grpo, model="folder", data="sums.jsonl", reward="last_number", steps=200)
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    job = prepare(method, settings, pairs, preset, seed)
    return carry_out(job, Loop, out, resume, quiet, callbacks)


def carry_out(
    job: Job,
    kind: type[Loop],
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    callbacks: Iterable[Any] = (),
) -> Run:
    """The run of a job, step by step as `kind` goes about it. See `train`."""
    began, told = time.perf_counter(), Callbacks(callbacks)
    loop = kind(job)  # refuses what cannot run, before there is a folder
    if out is None:
        if resume:
            raise ApportionError("there is no folder to go on with; give out=... (--out)")
        return _carry_out(Session(loop, None, began), quiet, told)
    folder = Path(out)
    with locked(folder):
        claim(folder, configuration(job), resume)
        if (folder / SUMMARY).exists():
            trained = models.load(folder / MODEL, dtype=job.setup.dtype, device=job.setup.device)
            return Run(job.method, trained, [], read_json(folder / SUMMARY, "the summary of a run"), folder)
        return _carry_out(Session(loop, folder, began), quiet, told)


def _carry_out(session: Session, quiet: bool, callbacks: Callbacks) -> Run:
    job = session.job
    name, limit = next(iter(job.setup.budget.items()))
    title = f"{job.method.name.partition('[')[0]} lm"
    with Display(title, limit, unit=name, quiet=quiet, at_first="sampling") as display, Interrupt() as interrupt:
        earlier = session.logs[METRICS].read() if session.logs else []
        info = RunInfo(
            title, session.folder, configuration(job), limit, session.unit, earlier, lambda: job.language_model
        )
        callbacks("on_start", info)
        rows = session.train(display, interrupt, callbacks)
        summary = session.finish()
    callbacks("on_end", summary)
    return Run(job.method, job.language_model, rows, summary, session.folder)


def configuration(job: Job) -> dict[str, Any]:
    """What config.json holds: everything that decides the run, and the versions it was made with.

    given: settings that were Python objects, of which only a description can be kept.
    """

    def told(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    setup = {f.name: told(getattr(job.setup, f.name)) for f in dataclasses.fields(job.setup)}
    shown = {
        "model": f"{type(job.language_model.causal).__name__} in memory",
        "reference": "a model in memory",
        "data": job.data.name,
        "eval_data": job.eval_data and job.eval_data.name,
        "reward": [f"{r.name}={r.weight:g}" for r in job.rewards],
    }
    given = [name for name in shown if not _text(setup[name])]
    setup |= {name: shown[name] for name in given}
    config = {
        "task": "lm",
        "method": described(job.method),
        "steps": job.setup.budget,
        "seed": job.seed,
        "setup": setup,
        "given": given,
        "sampling": dataclasses.asdict(job.sampling),
        "rows": {"data": len(job.data), "eval_data": job.eval_data and len(job.eval_data)},
        "policy": {"model": setup["model"], "class": type(job.language_model.causal).__name__},
        "versions": versions("torch", "transformers", "numpy"),
    }
    return json.loads(json.dumps(config))


def _text(value: Any) -> bool:
    """Whether a setting is text, which says all of it; other Python objects are only described."""
    return (
        value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    )


class Session:
    """One process's part of a run: from its checkpoint, if there is one, to the end. folder: None for memory only."""

    def __init__(self, loop: Loop, folder: Path | None, began: float) -> None:
        self.job, self.folder, self.loop = loop.job, folder, loop
        self.rows: list[dict[str, Any]] = []
        self.logs: dict[str, Lines] = {}
        self._zero = began
        if folder is not None:
            about = checkpoint.restore(folder, loop)
            kept, before = timing(folder / TIMING, about[METRICS][1])
            about[TIMING] = [kept, about[METRICS][1]]
            self.logs = {name: Lines(folder / name, *about[name]) for name in (METRICS, TIMING, SAMPLES)}
            self._zero = began - before.get("seconds", 0.0)

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, those of earlier sessions included."""
        return time.perf_counter() - self._zero

    def train(self, display: Display, interrupt: Interrupt, callbacks: Callbacks) -> list[dict[str, Any]]:
        """Up to the end of the budget, or until a callback stops it, with log rows and checkpoints on the way."""
        saved = time.perf_counter()
        loop, setup = self.loop, self.job.setup
        told = bool(self.logs) and self.logs[METRICS].rows > 0

        def doing(word: str = "") -> None:
            display.at(loop.counters[self.unit], word)

        if self.job.eval_data is not None and loop.step == 0 and not told:
            self._tell(loop.counters | self._evaluate(display), display, callbacks)
        doing()
        while not (loop.done or callbacks.stopped):
            if interrupt.caught:
                self.stop()
            try:
                row, drawn = loop.advance(doing)
            except ApportionError:
                self.save()
                raise
            if self.job.eval_data is not None:
                if loop.done or (setup.eval_every and loop.step % setup.eval_every == 0):
                    row |= self._evaluate(display)
            elif loop.step == 1 or loop.step % EVERY == 0:
                self._show(drawn, "train", display)
            self._tell(row, display, callbacks)
            doing()
            if time.perf_counter() - saved >= CHECKPOINT_SECONDS:
                self.save(callbacks)
                saved = time.perf_counter()
        self.save(callbacks)
        return self.rows

    @property
    def unit(self) -> str:
        """The field of a row that counts the budget."""
        unit = next(iter(self.job.setup.budget))
        return "step" if unit == "steps" else unit

    def _tell(self, row: dict[str, Any], display: Display, callbacks: Callbacks) -> None:
        self.rows.append(row)
        if self.logs:
            self.logs[METRICS].add(row)
            self.logs[TIMING].add({"step": row["step"], "seconds": round(self.seconds, 3)})
        display.row(row)
        callbacks("on_row", row)

    def _evaluate(self, display: Display) -> dict[str, Any]:
        at, size = self.loop.counters[self.unit], len(self.job.eval_data or ())
        found, batch = self.loop.evaluate(lambda done: display.at(at, f"evaluating {done}/{size}"))
        self._show(batch, "eval", display)
        return found

    def _show(self, batch: Batch | None, kind: str, display: Display) -> None:
        if batch is None:
            return
        told = records(self.job, batch, self.loop.step, kind)
        for record in told if self.logs else ():
            self.logs[SAMPLES].add(record)
        if told and display.shows:
            display.show(table(told))

    def save(self, callbacks: Callbacks | None = None) -> None:
        """A checkpoint of the step at hand; the logs it counts on are on the disk before it."""
        if self.folder is not None:
            for log in self.logs.values():
                log.settle()
            checkpoint.save(self.folder, self.loop, {n: [self.logs[n].size, self.logs[n].rows] for n in self.logs})
            if callbacks is not None:
                callbacks("on_checkpoint", self.folder)

    def stop(self) -> None:
        """Save, say how to go on, and raise KeyboardInterrupt."""
        self.save()
        self._say_stopped()
        raise KeyboardInterrupt

    def _say_stopped(self) -> None:
        if self.folder is not None:
            say_stopped(f"step {self.loop.step:,}", self.folder)

    def finish(self) -> dict[str, Any]:
        """The summary; of a run whose budget is used up, it and the model are written."""
        tokens, seconds = self.loop.tokens, self.seconds
        summary = {
            "method": self.job.method.name,
            "task": "lm",
            "model": configuration(self.job)["setup"]["model"],
            "seed": self.job.seed,
            **self.loop.counters,
            **self._scores(),
            "wall_seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
        }
        for log in self.logs.values():
            log.close()
        if self.folder is not None:
            summary["out"] = str(self.folder)
        if not self.loop.done:
            summary["stopped"] = True
            self._say_stopped()
        elif self.folder is not None:
            models.save(self.job.language_model, self.folder / MODEL)
            write_json(self.folder / SUMMARY, summary)
            checkpoint.clear(self.folder)
        return summary

    def _scores(self) -> dict[str, Any]:
        """Evaluations before and after, and what the last rows show."""
        rows = self.logs[METRICS].read() if self.logs else self.rows
        evaluated = [r for r in rows if any(name.startswith("eval_") for name in r)]
        found: dict[str, Any] = {}
        if evaluated:
            first, last = evaluated[0], evaluated[-1]
            found |= {f"{k}_before": v for k, v in first.items() if k in ("eval_accuracy", "eval_loss")}
            found |= {k: v for k, v in last.items() if k.startswith("eval_")}
        last = rows[-1]
        return found | {k: last[k] for k in ("return_mean", "accuracy", "loss", "entropy") if k in last}
