"""A training run in a folder: configuration, metrics as they come, checkpoints, policy, summary.

Killed at any moment, the folder can be gone on with, and its metrics and parameters end up bitwise the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from apportion import __version__
from apportion.control import checkpoint
from apportion.control.cache import enable
from apportion.control.checkpoint import CHECKPOINT, CONFIG, METRICS, POLICY, SUMMARY, TIMING
from apportion.control.engine import Engine, Plan
from apportion.control.evaluate import evaluate_policy, evaluate_run
from apportion.control.host_engine import HostEngine
from apportion.control.loop import Carry, Loop
from apportion.control.train import Overrides, check_seed, prepare, summarise
from apportion.core.errors import ApportionError, ApportionWarning
from apportion.core.method import Method

__all__ = ["evaluate_run", "train_run"]

CHECKPOINT_SECONDS = 2.0
"""Least time between two checkpoints."""
PLAIN_SECONDS = 5.0
"""Time between two lines of progress where there is no terminal."""


def train_run(
    method: Method | str,
    task: str,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    overrides: Overrides = (),
    resume: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train in a folder and return what its summary.json holds.

    steps: environment steps; None takes the preset's. out: None makes it runs/METHOD-TASK-seedSEED. resume: go on
    with the run that the folder holds, or begin if it holds none. quiet: no progress on standard error.

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
        _claim(folder, config, resume)
        if (folder / SUMMARY).exists():
            return checkpoint.read_json(folder / SUMMARY, "the summary of a run")
        with Display(engine, quiet) as display, Interrupt() as interrupt:
            session = Session(folder, engine, config["seed"], began)
            session.train(display, interrupt)
            return session.finish()


def configuration(engine: Plan, seed: int, overrides: list[tuple[str, Any]]) -> dict[str, Any]:
    """What config.json holds: everything that decides the run, and the versions it was made with."""
    method = {
        f.name: getattr(engine.method, f.name)
        for f in dataclasses.fields(engine.method)
        if f.name not in ("claim", "title", "target", "lineage", "differs", "settings")
    }
    config = {
        "task": engine.simulator.id,
        "method": {k: v if isinstance(v, str | float | None) else repr(v) for k, v in method.items()},
        "steps": engine.total_steps,
        "seed": seed,
        "overrides": {path: repr(value) for path, value in overrides},
        "setup": dataclasses.asdict(engine.setup),
        "policy": dataclasses.asdict(engine.policy),
        "versions": versions(),
    }
    return json.loads(json.dumps(config))


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("jax", "jaxlib", "numpy", "optax")}
    return {"apportion": __version__, "python": platform.python_version()} | packages


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this process alone. The system lets go of it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise checkpoint.cannot_write(folder, error) from error
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ApportionError(f"{folder} is in use by another process; wait for it, or name another --out") from None
    except (ImportError, OSError):
        pass  # no locks on this system or file system
    try:
        yield
    finally:
        os.close(descriptor)


def _claim(folder: Path, config: dict[str, Any], resume: bool) -> None:
    """Make the folder this run's, or find that it is. Raises ApportionError for another's."""
    if not (folder / CONFIG).exists():
        if strays := [n for n in (CHECKPOINT, METRICS, POLICY, SUMMARY) if (folder / n).exists()]:
            raise ApportionError(f"{folder} holds {strays[0]} but no {CONFIG}; name another --out")
        checkpoint.write_json(folder / CONFIG, config)
        return
    if not resume:
        raise ApportionError(f"{folder} already holds a run; go on with it by --resume, or name another --out")
    found = checkpoint.read_config(folder)
    # The task comes first: another task's preset differs in many values, which follow from it.
    for path, here, there in sorted(differences(config, found), key=lambda d: d[0] != "task"):
        if not path.startswith("versions."):
            raise ApportionError(
                f"{folder} holds another run: {path} is {there} there and {here} here; "
                "repeat its command with --resume, or name another --out"
            )
        warnings.warn(
            f"{folder} was begun with {path.removeprefix('versions.')} {there} and goes on with {here}; "
            "the last bits may differ",
            ApportionWarning,
            stacklevel=3,
        )


def differences(here: Any, there: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, here, there) of every value in which two JSON objects differ; causes (task, method) before effects.

    >>> list(differences({"seed": 1, "setup": {"envs": 8}}, {"seed": 0, "setup": {"envs": 8}}))
    [('seed', 1, 0)]
    """
    if isinstance(here, dict) and isinstance(there, dict):
        for key in [*here, *(k for k in there if k not in here)]:
            yield from differences(here.get(key), there.get(key), f"{path}.{key}" if path else key)
    elif here != there:
        yield path, here, there


class Lines:
    """A file of JSON lines that grows; `size` bytes and `rows` lines of it are known to be whole."""

    def __init__(self, path: Path, size: int = 0, rows: int = 0) -> None:
        self.path, self.size, self.rows = path, size, rows
        try:
            self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the session)
            found = os.fstat(self._file.fileno()).st_size
            if found < size:
                raise ApportionError(f"{path} is shorter than its checkpoint says; start again in another folder")
            self._file.truncate(size)
        except OSError as error:
            raise checkpoint.cannot_write(path, error) from error

    def add(self, row: dict[str, Any]) -> None:
        """Append one line. Raises ApportionError when the disk refuses."""
        data = (json.dumps(row) + "\n").encode()
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise checkpoint.cannot_write(self.path, error) from error
        self.size, self.rows = self.size + len(data), self.rows + 1

    def settle(self) -> None:
        """Have everything on the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise checkpoint.cannot_write(self.path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Session:
    """One process's part of a run: from its checkpoint, if there is one, to the end."""

    def __init__(self, folder: Path, engine: Engine | HostEngine, seed: int, began: float) -> None:
        self.folder, self.engine, self.seed = folder, engine, seed
        path, about, arrays = folder / CHECKPOINT, {"metrics_bytes": 0, "rows": 0}, None
        if path.exists():
            arrays, about = checkpoint.load(path)
            for name, here in (("task", engine.simulator.id), ("method", engine.method.name), ("seed", seed)):
                if about.get(name) != here:
                    raise ApportionError(f"{path} is of {name} {about.get(name)}, not of {name} {here}")
        self.metrics = Lines(folder / METRICS, about["metrics_bytes"], about["rows"])
        kept, before = _timing(folder / TIMING, about["rows"])
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

    def finish(self) -> dict[str, Any]:
        """Write policy and summary of a run that has reached its steps."""
        networks, seconds = self.engine.networks(self.loop.carry.state), self.seconds
        self._write(POLICY, networks)
        score = evaluate_policy(self.engine.simulator, self.engine.policy, networks, seed=self.seed)
        summary = summarise(self.engine, self.seed, self.about, score, seconds, self.compiling)
        summary["out"] = str(self.folder)
        checkpoint.write_json(self.folder / SUMMARY, summary)
        self.metrics.close()
        self.timing.close()
        return summary


def _timing(path: Path, rows: int) -> tuple[int, dict[str, float]]:
    """Bytes of the first `rows` lines of timing.jsonl, and the last of them. It is only told, never relied upon."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)[:rows]
        return sum(map(len, lines)), json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return 0, {}


class Interrupt:
    """Holds the first SIGINT back until the iteration is whole; a second one interrupts at once."""

    def __init__(self) -> None:
        self.caught = False
        self._old: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGINT, self._catch)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)

    def _catch(self, *_: object) -> None:
        if self.caught:
            raise KeyboardInterrupt
        self.caught = True


class Display:
    """Progress on standard error: a live bar on a terminal, a line every few seconds elsewhere, nothing when quiet."""

    def __init__(self, engine: Plan, quiet: bool) -> None:
        self.title, self.total = f"{engine.method.name.partition('[')[0]} {engine.simulator.id}", engine.total_steps
        self.live = not quiet and sys.stderr.isatty()
        self.plain = not quiet and not self.live
        self.signals = ""
        self._bar: Any = None
        self._begun: tuple[float, int] | None = None
        self._said = time.perf_counter()

    def __enter__(self) -> Display:
        if self.live:
            from rich import progress
            from rich.console import Console

            console = Console(stderr=True)
            columns = (progress.BarColumn(None), progress.TextColumn("{task.fields[text]}"))
            self._bar = progress.Progress(
                progress.TextColumn(self.title), *columns, console=console, expand=True, refresh_per_second=5
            )
            self._task = self._bar.add_task("", total=None, text="compiling")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def row(self, row: dict[str, Any]) -> None:
        """Take the signals of a log row."""
        shown = {"return": ("return_mean", ".1f"), "entropy": ("entropy", ".2f"), "clip": ("clip_fraction", ".2f")}
        parts = [f"{k} {row[name]:{form}}" for k, (name, form) in shown.items() if row[name] is not None]
        self.signals = " ".join(parts)

    def at(self, env_steps: int) -> None:
        """Say that so many environment steps have been taken."""
        now = time.perf_counter()
        if self._begun is None:
            self._begun = (now, env_steps)
        rate = (env_steps - self._begun[1]) / max(now - self._begun[0], 1e-9)
        speed = f"{rate:,.0f}/s  {max(self.total - env_steps, 0) / rate:.0f} s left" if rate else ""
        text = "  ".join(filter(None, (f"{env_steps:,}/{self.total:,} steps", speed, self.signals)))
        if self._bar is not None:
            self._bar.update(self._task, completed=min(env_steps, self.total), total=self.total, text=text)
        elif self.plain and now - self._said >= PLAIN_SECONDS:
            self._said = now
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)
