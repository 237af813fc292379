"""A training run in a folder: configuration, metrics as they come, checkpoints, policy, summary.

Killed at any moment, the folder can be gone on with, and its metrics and parameters end up bitwise the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from apportion.control import checkpoint
from apportion.control.cache import enable
from apportion.control.engine import Engine
from apportion.control.evaluate import EPISODES, TrainedPolicy, evaluate_policy, evaluate_run
from apportion.control.host_engine import HostEngine
from apportion.control.loop import Carry, Loop
from apportion.control.periodic import Periodic
from apportion.control.train import Overrides, configuration, prepare, summarise
from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.runs.callbacks import Callbacks, RunInfo
from apportion.runs.display import Display, Interrupt, say_stopped
from apportion.runs.files import CHECKPOINT, METRICS, POLICY, SUMMARY, TIMING, load_arrays, read_json, write_json
from apportion.runs.folder import claim, locked
from apportion.runs.lines import Lines, timing
from apportion.runs.seed import check_seed

__all__ = ["evaluate_run", "train_run"]

CHECKPOINT_SECONDS = 2.0
"""Least time between two checkpoints."""


def train_run(
    method: Method | str,
    task: str,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    quiet: bool = False,
    callbacks: Iterable[Any] = (),
    episodes: int = EPISODES,
    eval_every: int | None = None,
) -> dict[str, Any]:
    """Train in a folder and return what its summary.json holds.

    steps: environment steps; None takes the preset's. out: None makes it runs/METHOD-TASK-seedSEED. resume: go on
    with the run that the folder holds, or begin if it holds none. quiet: no progress on standard error.
    callbacks: see `runs.callbacks`; a run that one of them stopped has no summary.json yet, and resume goes on with it.
    episodes: of an evaluation. eval_every: environment steps between those before the end (see `periodic.Periodic`);
    None makes only the one at the end.

    Raises ApportionError for what does not exist or fit, a folder that already holds a run (unless resume), a run of
    another configuration, a folder in use, a full disk, and training that became non-finite. At SIGINT it saves
    and raises KeyboardInterrupt.
    """
    began = time.perf_counter()
    told = Callbacks(callbacks)
    enable()
    pairs = list(overrides.items() if hasattr(overrides, "items") else overrides)
    engine = prepare(method, task, steps, pairs)
    config = configuration(engine, check_seed(seed), pairs, eval_every, episodes)
    name = method if isinstance(method, str) else method.name.partition("[")[0]
    folder = Path("runs", f"{name}-{task}-seed{seed}") if out is None else Path(out)
    return conduct(folder, engine, config, f"{name} {task}", began, resume, quiet, told, Loop, episodes, eval_every)


def conduct(
    folder: Path,
    engine: Engine | HostEngine,
    config: dict[str, Any],
    name: str,
    began: float,
    resume: bool,
    quiet: bool,
    callbacks: Callbacks,
    loop: Callable[..., Any],
    episodes: int = EPISODES,
    eval_every: int | None = None,
) -> dict[str, Any]:
    """A run in its folder from wherever it stands to its end. loop: makes what trains, as `Loop` is made."""
    with locked(folder):
        claim(folder, config, resume)
        if (folder / SUMMARY).exists():
            return read_json(folder / SUMMARY, "the summary of a run")
        with Display(name, engine.total_steps, quiet=quiet) as display, Interrupt() as interrupt:
            session = Session(folder, engine, config["seed"], began, loop, episodes, eval_every)
            info = RunInfo(
                name, folder, config, engine.total_steps, "env_steps", session.metrics.read(), session.policy
            )
            callbacks("on_start", info)
            session.train(display, interrupt, callbacks)
            summary = session.finish()
        callbacks("on_end", summary)
        return summary


class Session:
    """One process's part of a run: from its checkpoint, if there is one, to the end."""

    def __init__(
        self,
        folder: Path,
        engine: Engine | HostEngine,
        seed: int,
        began: float,
        loop: Callable[..., Any],
        episodes: int,
        eval_every: int | None,
    ) -> None:
        self.folder, self.engine, self.seed = folder, engine, seed
        path, about, arrays = folder / CHECKPOINT, {"metrics_bytes": 0, "rows": 0}, None
        if path.exists():
            arrays, about = load_arrays(path)
            for name, here in (("task", engine.simulator.id), ("method", engine.method.name), ("seed", seed)):
                if about.get(name) != here:
                    raise ApportionError(f"{path} is of {name} {about.get(name)}, not of {name} {here}")
        self.metrics = Lines(folder / METRICS, about["metrics_bytes"], about["rows"])
        kept, before = timing(folder / TIMING, about["rows"])
        self.timing = Lines(folder / TIMING, kept, about["rows"])

        told, spent = self.metrics.read(), before.get("eval_seconds", 0.0)
        self.periodic = Periodic(engine, eval_every, episodes, seed, told[-1]["env_steps"] if told else 0, spent)

        def restore(template: Carry) -> Carry:
            return checkpoint.restore(path, arrays or {}, template)

        self.loop = loop(engine, seed, None if arrays is None else restore)
        self.compiling = before.get("compile_seconds", 0.0) + self.loop.compile_seconds
        self._zero = began - before.get("seconds", 0.0)

    @property
    def about(self) -> dict[str, int]:
        """Where the run stands."""
        return {"env_steps": int(self.loop.env_steps), "iterations": int(self.loop.iterations)}

    @property
    def seconds(self) -> float:
        """Seconds spent on the run, those of earlier sessions included."""
        return time.perf_counter() - self._zero

    @property
    def clock(self) -> dict[str, float]:
        """All seconds so far, and of them those of compiling and of evaluations."""
        told = {"seconds": self.seconds, "compile_seconds": self.compiling, "eval_seconds": self.periodic.seconds}
        return {name: round(value, 3) for name, value in told.items()}

    def policy(self) -> TrainedPolicy:
        """The policy as it is now."""
        networks = self.engine.networks(self.loop.carry.state)
        return TrainedPolicy(self.engine.simulator, self.engine.policy, networks, self.seed)

    def train(self, display: Display, interrupt: Interrupt, callbacks: Callbacks) -> None:
        """Up to the run's steps or until a callback stops it, with log rows and checkpoints on the way."""
        saved = time.perf_counter()
        while not (self.loop.done or callbacks.stopped):
            if interrupt.caught:
                self.stop()
            for row in self.loop.step():
                if row is not None:
                    row = self.periodic.look(row, lambda: self.engine.networks(self.loop.carry.state))
                    self.metrics.add(row)
                    self.timing.add({"env_steps": row["env_steps"]} | self.clock)
                    display.row(row)
                    callbacks("on_row", row)
            display.at(int(self.loop.env_steps))
            if time.perf_counter() - saved >= CHECKPOINT_SECONDS:
                self.save()
                callbacks("on_checkpoint", self.folder / CHECKPOINT)
                saved = time.perf_counter()
        self.save()
        callbacks("on_checkpoint", self.folder / CHECKPOINT)

    def save(self) -> None:
        """A checkpoint of the iteration at hand; the metrics it counts on are on the disk before it."""
        self.metrics.settle()
        self._write(CHECKPOINT, self.loop.carry)

    def _write(self, name: str, tree: Any) -> None:
        about = {"task": self.engine.simulator.id, "method": self.engine.method.name, "seed": self.seed}
        log = {"rows": self.metrics.rows, "metrics_bytes": self.metrics.size}
        checkpoint.save(self.folder / name, tree, about | self.about | log)

    def stop(self) -> None:
        """Save, say how to go on, and raise KeyboardInterrupt."""
        self.save()
        self._say_stopped()
        raise KeyboardInterrupt

    def _say_stopped(self) -> None:
        say_stopped(f"{self.about['env_steps']:,} environment steps", self.folder)

    def finish(self) -> dict[str, Any]:
        """The summary; of a run that has reached its steps, it and the policy are written."""
        networks, clock = self.engine.networks(self.loop.carry.state), self.clock
        if self.loop.done:
            self._write(POLICY, networks)
        score = evaluate_policy(self.engine.simulator, self.engine.policy, networks, self.periodic.episodes, self.seed)
        summary = summarise(self.engine, self.seed, self.about, score, clock)
        summary["out"] = str(self.folder)
        if self.loop.done:
            write_json(self.folder / SUMMARY, summary)
        else:
            summary["stopped"] = True
            self._say_stopped()
        self.metrics.close()
        self.timing.close()
        return summary
