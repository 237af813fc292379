"""PPO on a MuJoCo task beside the limit, raw physics, and beside its peers, in one run on one machine.

    pip install -e ".[mujoco,bench]" torch==2.13.0 && python benchmarks/control/halfcheetah.py [TASK] [--all]

Raw physics is MuJoCo's own batch with random controls on all threads, as many simulations as training has. Training is
the task's preset, then Stable-Baselines3's default batch settings (10 epochs, minibatches of 64 of 2,048), which is
also what Stable-Baselines3 and the PPO in CleanRL's manner run, and then fewer passes over larger collections, whose
return benchmarks/control/returns.py compares with Stable-Baselines3's. Each program runs in a process of its own, they
take turns, and the best turn of each counts; peak memory is the process's. Shares are of the training's time: physics
(with reward and observation), acting, the update, restoring and saving states.
--all: also on one CPU, two runs side by side on one CPU each, and from 8 to 4,096 simulations. Rejax and Brax do not
run Gymnasium's tasks (theirs of the same name are other simulations), and are not here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS, SECONDS = 3, 5.0
DEFAULTS = {"setup.envs": 16, "sampler.horizon": 128, "sampler.minibatches": 32, "sampler.epochs": 10}
FEWER_PASSES = {"setup.envs": 256, "sampler.horizon": 16, "sampler.minibatches": 4, "sampler.epochs": 2}
FEWER_PASSES |= {"update.learning_rate": 1e-3}
SIZES = (8, 32, 128, 512, 2048, 4096)
PEERS = {"stable-baselines3": "stable_baselines3", "cleanrl-style": "torch"}
"""Peers, and the package that each needs."""


def paced(step: Callable[[], int], seconds: float = SECONDS) -> float:
    """Environment steps per second of calling `step` for so long; it returns how many it made."""
    made, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        made += step()
    return made / (time.perf_counter() - began)


def physics(task: str, size: int) -> Callable[[], int]:
    """A hundred steps of `size` simulations with random controls, nothing else."""
    from mujoco.batch import Batch

    from apportion.control.hosts import TASKS
    from apportion.control.hosts.mujoco import load

    model = load(TASKS[task])
    batch = Batch(model, size, 0)
    batch.reset()
    control, (low, high) = batch.bind("ctrl"), model.actuator_ctrlrange.T
    draws = np.random.default_rng(0).uniform(low, high, (100, size, model.nu))

    def step() -> int:
        for draw in draws:
            control[:] = draw
            batch.step(nstep=TASKS[task].frame_skip)
        return len(draws) * size

    return step


class Training:
    """One iteration of our PPO at a time, and where its time went."""

    def __init__(self, task: str, **overrides: Any) -> None:
        import jax

        from apportion.control.train import prepare

        self.engine = prepare("ppo", task, overrides=overrides)
        self.state = self.engine.init(0)
        began = time.perf_counter()
        self.engine.compile(self.state)
        self.compiling = time.perf_counter() - began
        self.spent, self.total = dict.fromkeys(("physics", "act", "update", "states"), 0.0), 0.0
        host, wait = self.engine.host, jax.block_until_ready
        watched = [(host, "step", "physics"), (host, "observe", "physics"), (host, "reset", "physics")]
        watched += [(host, "snapshot", "states"), (host, "restore", "states")]
        for where, name, share in (*watched, (self.engine, "_act", "act"), (self.engine, "_learn", "update")):
            where.__dict__[name] = self._timed(getattr(where, name), share, wait if where is self.engine else None)

    def _timed(self, call: Callable[..., Any], share: str, wait: Callable[[Any], Any] | None) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            out = call(*args) if wait is None else wait(call(*args))
            self.spent[share] += time.perf_counter() - began
            return out

        return timed

    def __call__(self) -> int:
        began = time.perf_counter()
        self.state, _ = self.engine.iterate(self.state)
        self.total += time.perf_counter() - began
        return self.engine.batch

    def shares(self) -> dict[str, float]:
        """Parts of the time so far; they add up to 1."""
        known = {name: seconds / self.total for name, seconds in self.spent.items()}
        return {**known, "other": 1 - sum(known.values())}


def stable_baselines(task: str) -> Callable[[], int]:
    """One collection and update of Stable-Baselines3's PPO at its defaults."""
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", task, device="cpu", seed=0)

    def step() -> int:
        model.learn(2_048, reset_num_timesteps=False)
        return 2_048

    return step


def program(name: str, task: str, size: int | None) -> Callable[[], int]:
    """What one process measures."""
    if name == "stable-baselines3":
        return stable_baselines(task)
    if name == "cleanrl-style":
        from cleanrl_style import Program

        return Program(task)
    from apportion.control.cache import enable
    from apportion.control.train import prepare

    enable()
    if name == "physics":
        return physics(task, size or prepare("ppo", task).setup.envs)
    if name == "sb3-batches":
        return Training(task, **DEFAULTS)
    if name == "fewer-passes":
        return Training(task, **FEWER_PASSES)
    sized = {} if size is None else {"setup.envs": size, "sampler.minibatches": max(1, size // 4)}
    return Training(task, **sized)


def measure(name: str, task: str, size: int | None) -> dict[str, Any]:
    """One program's rate, peak memory and, of training, shares of its time and seconds of compilation."""
    step = program(name, task, size)
    step()
    found: dict[str, Any] = {"rate": paced(step)}
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if isinstance(step, Training):
        found |= {"shares": step.shares(), "compile_s": step.compiling}
    return found


def started(name: str, task: str, cpus: Sequence[int] | None = None, size: int | None = None) -> subprocess.Popen[str]:
    """A process that measures; on some CPUs only, if they are given."""
    given = ["--measure", name, *(["--size", str(size)] if size else [])]
    given += ["--cpus", ",".join(map(str, cpus))] if cpus else []
    return subprocess.Popen([sys.executable, __file__, task, *given], stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))} failed")
    return json.loads(out.splitlines()[-1])


def best(turns: list[dict[str, Any]]) -> dict[str, Any]:
    return max(turns, key=lambda turn: turn["rate"])


def compare(task: str) -> dict[str, Any]:
    """The best turn of every program that is installed, and what is not."""
    names = ["physics", "preset", "sb3-batches", "fewer-passes", *PEERS]
    absent = [name for name, package in PEERS.items() if importlib.util.find_spec(package) is None]
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name not in absent}
    for _ in range(ROUNDS):
        for name, mine in turns.items():
            mine.append(read(started(name, task)))
    return {"programs": {name: best(mine) for name, mine in turns.items()}, "absent": absent}


def threads(task: str) -> dict[str, float]:
    """Training and physics on one CPU, and two trainings side by side on one CPU each; best of several turns."""
    rates: dict[str, list[float]] = {"physics, one CPU": [], "training, one CPU": [], "two trainings, one CPU each": []}
    for _ in range(ROUNDS):
        rates["physics, one CPU"].append(read(started("physics", task, [0]))["rate"])
        rates["training, one CPU"].append(read(started("preset", task, [0]))["rate"])
        both = [started("preset", task, [cpu]) for cpu in (0, 1)]
        rates["two trainings, one CPU each"].append(sum(read(process)["rate"] for process in both))
    return {name: max(found) for name, found in rates.items()}


def sizes(task: str) -> list[dict[str, float]]:
    """Raw physics and training (64 steps, minibatches of 256 or the whole collection) by number of simulations."""
    rows = []
    for size in SIZES:
        raw, training = read(started("physics", task, size=size)), read(started("preset", task, size=size))
        row = {"simulations": size, "physics": raw["rate"], "training": training["rate"]}
        rows.append(row | {"peak_mb": training["peak_mb"]})
    return rows


def show(found: dict[str, Any]) -> None:
    """Print as tables."""
    limit, peer = found["programs"]["physics"]["rate"], found["programs"].get("stable-baselines3", {}).get("rate")
    print(f"{found['task']}, {found['cpus']} CPUs, best of {ROUNDS} turns\n")
    print(f"{'':<20}{'env steps/s':>12}{'of physics':>12}{'of SB3':>8}{'peak MB':>9}   where the time goes")
    for name, one in found["programs"].items():
        shares = " ".join(f"{k} {v:.1%}" for k, v in one.get("shares", {}).items())
        times = f"{one['rate'] / peer:.1f}x" if peer else ""
        print(
            f"{name:<20}{one['rate']:>12,.0f}{one['rate'] / limit:>12.0%}{times:>8}{one['peak_mb']:>9,.0f}   {shares}"
        )
    for name in found["absent"]:
        print(f"{name} needs {PEERS[name]}, which is not installed here; it was not run")
    print(f"\ncompiling the preset: {found['programs']['preset']['compile_s']:.1f} s (less where the cache has it)")
    for name, rate in found.get("threads", {}).items():
        print(f"{name:<30}{rate:>10,.0f}")
    if "threads" in found:
        one, two = (found["threads"][name] for name in ("training, one CPU", "two trainings, one CPU each"))
        print(f"{'side by side':<30}{two / one:>9.2f}x")
    for row in found.get("sizes", []):
        raw, training = f"physics {row['physics']:>9,.0f}", f"training {row['training']:>9,.0f}"
        print(f"{row['simulations']:>6} simulations: {raw}, {training}, {row['peak_mb']:>6,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="HalfCheetah-v5", metavar="TASK")
    parser.add_argument("--all", action="store_true", help="also threads and sizes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", metavar="PROGRAM", help="only one program, in this process, as one line of JSON")
    parser.add_argument("--size", type=int, metavar="M", help="of --measure: simulations")
    parser.add_argument("--cpus", metavar="0,1", help="of --measure: the CPUs to run on")
    args = parser.parse_args()
    if args.measure:
        if args.cpus:
            os.sched_setaffinity(0, set(map(int, args.cpus.split(","))))
        print(json.dumps(measure(args.measure, args.task, args.size)))
        return
    found = {"task": args.task, "cpus": os.cpu_count()} | compare(args.task)
    if args.all:
        found |= {"threads": threads(args.task), "sizes": sizes(args.task)}
    show(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
