"""A training run in a folder: configuration, metrics as they come, checkpoints, policy, summary.

Killed at any moment, the folder can be gone on with, and its metrics and parameters end up bitwise the same.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from apportion.control import checkpoint
from apportion.control.cache import enable
from apportion.control.engine import Engine, Plan
from apportion.control.evaluate import EPISODES, evaluate_policy, evaluate_run
from apportion.control.host_engine import HostEngine
from apportion.control.loop import Carry, Loop
from apportion.control.train import Overrides, check_seed, prepare, summarise
from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.runs.display import Display, Interrupt
from apportion.runs.files import CHECKPOINT, METRICS, POLICY, SUMMARY, TIMING, load_arrays, read_json, write_json
from apportion.runs.folder import claim, described, locked, versions
from apportion.runs.lines import Lines, timing

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
    episodes: int = EPISODES,
) -> dict[str, Any]:
    """Train in a folder and return what its summary.json holds.

    steps: environment steps; None takes the preset's. out: None makes it runs/METHOD-TASK-seedSEED. resume: go on
    with the run that the folder holds, or begin if it holds none. quiet: no progress on standard error.
    episodes: of the final evaluation.

    Raises ApportionError for what does not exist or fit, a folder that already holds a run (unless resume), a run of
    another configuration, a folder in use, a full disk, and training that became non-finite. At SIGINT it saves
    and raises KeyboardInterrupt.
    """
    began = time.perf_counter()
    enable()
    pairs = list(overrides.items() if hasattr(overrides, "items") else overrides)
    engine = prepare(method, task, steps, pairs)
    config = configuration(engine, check_seed(seed), pairs)
    name = method if isinstance(method, str) else method.name.partition("[")[0]
    folder = Path("runs", f"{name}-{task}-seed{seed}") if out is None else Path(out)
    with locked(folder):
        claim(folder, config, resume)
        if (folder / SUMMARY).exists():
            return read_json(folder / SUMMARY, "the summary of a run")
        with Display(f"{name} {task}", engine.total_steps, quiet=quiet) as display, Interrupt() as interrupt:
            session = Session(folder, engine, config["seed"], began)
            session.train(display, interrupt)
            return session.finish(episodes)


def configuration(engine: Plan, seed: int, overrides: list[tuple[str, Any]]) -> dict[str, Any]:
    """What config.json holds: everything that decides the run, and the versions it was made with."""
    config = {
        "task": engine.simulator.id,
        "method": described(engine.method),
        "steps": engine.total_steps,
        "seed": seed,
        "overrides": {path: repr(value) for path, value in overrides},
        "setup": dataclasses.asdict(engine.setup),
        "policy": dataclasses.asdict(engine.policy),
        "versions": versions("jax", "jaxlib", "numpy", "optax"),
    }
    return json.loads(json.dumps(config))


class Session:
    """One process's part of a run: from its checkpoint, if there is one, to the end."""

    def __init__(self, folder: Path, engine: Engine | HostEngine, seed: int, began: float) -> None:
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

        def restore(template: Carry) -> Carry:
            return checkpoint.restore(path, arrays or {}, template)

        self.loop = Loop(engine, seed, None if arrays is None else restore)
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

    def train(self, display: Display, interrupt: Interrupt) -> None:
        """Up to the run's steps, with log rows and checkpoints on the way."""
        saved = time.perf_counter()
        while not self.loop.done:
            if interrupt.caught:
                self.stop()
            for row in self.loop.step():
                if row is not None:
                    self.metrics.add(row)
                    timing = {"seconds": round(self.seconds, 3), "compile_seconds": round(self.compiling, 3)}
                    self.timing.add({"env_steps": row["env_steps"]} | timing)
                    display.row(row)
            display.at(int(self.loop.env_steps))
            if time.perf_counter() - saved >= CHECKPOINT_SECONDS:
                self.save()
                saved = time.perf_counter()
        self.save()

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
        at = f"{self.about['env_steps']:,} environment steps"
        print(f"apportion: stopped at {at}, saved in {self.folder}; repeat with --resume to go on", file=sys.stderr)
        raise KeyboardInterrupt

    def finish(self, episodes: int) -> dict[str, Any]:
        """Write policy and summary of a run that has reached its steps."""
        networks, seconds = self.engine.networks(self.loop.carry.state), self.seconds
        self._write(POLICY, networks)
        score = evaluate_policy(self.engine.simulator, self.engine.policy, networks, episodes, self.seed)
        summary = summarise(self.engine, self.seed, self.about, score, seconds, self.compiling)
        summary["out"] = str(self.folder)
        write_json(self.folder / SUMMARY, summary)
        self.metrics.close()
        self.timing.close()
        return summary
