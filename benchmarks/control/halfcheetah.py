"""PPO on a MuJoCo task beside the limit, raw physics, and beside Stable-Baselines3, in one run on one machine.

    pip install -e ".[mujoco]" stable-baselines3 && python benchmarks/control/halfcheetah.py

Raw physics is MuJoCo's own batch with random controls on all threads, as many simulations as training has. Training is
the task's preset, and then Stable-Baselines3's default batch settings (10 epochs, minibatches of 64 of 2,048), which
is also what Stable-Baselines3 itself runs. The programs take turns, and the best of each is compared. Shares are of
the training's time: physics (with reward and observation), acting, the update, restoring and saving states.
--sizes: also the rates from 8 to 4,096 simulations.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROUNDS, SECONDS = 3, 4.0
DEFAULTS = {"setup.envs": 16, "sampler.horizon": 128, "sampler.minibatches": 32, "sampler.epochs": 10}
SIZES = (8, 32, 128, 512, 2048, 4096)


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


def stable_baselines(task: str) -> Callable[[], int] | None:
    """One collection and update of Stable-Baselines3's PPO at its defaults, or None where it is not installed."""
    try:
        from stable_baselines3 import PPO
    except ImportError:
        return None
    model = PPO("MlpPolicy", task, device="cpu", seed=0)

    def step() -> int:
        model.learn(2_048, reset_num_timesteps=False)
        return 2_048

    return step


def compare(task: str) -> dict[str, Any]:
    """Rates of everything, best of several turns."""
    preset, same = Training(task), Training(task, **DEFAULTS)
    programs: dict[str, Callable[[], int]] = {
        "raw physics": physics(task, preset.engine.size),
        "apportion, preset": preset,
        "apportion, SB3's batches": same,
    }
    if (theirs := stable_baselines(task)) is not None:
        programs[f"Stable-Baselines3 {importlib.metadata.version('stable-baselines3')}"] = theirs
    rates = dict.fromkeys(programs, 0.0)
    for step in programs.values():
        step()
    for _ in range(ROUNDS):
        rates = {name: max(rates[name], paced(step)) for name, step in programs.items()}
    shares = {"apportion, preset": preset.shares(), "apportion, SB3's batches": same.shares()}
    return {"task": task, "cpus": os.cpu_count(), "rates": rates, "shares": shares, "compile_s": preset.compiling}


def sizes(task: str) -> list[dict[str, float]]:
    """Raw physics and training (64 steps, minibatches of 256 or the whole collection) by number of simulations."""
    rows = []
    for size in SIZES:
        raw = paced(physics(task, size), SECONDS / 2)
        training = Training(task, **{"setup.envs": size, "sampler.minibatches": max(1, size // 4)})
        training()
        rows.append({"simulations": size, "raw": raw, "training": paced(training, SECONDS)})
    return rows


def show(found: dict[str, Any]) -> None:
    """Print as tables."""
    rates = found["rates"]
    print(f"{found['task']}, {found['cpus']} CPUs, best of {ROUNDS} turns\n")
    print(f"{'':<28}{'env steps/s':>12}{'of physics':>12}   where the time goes")
    for name, rate in rates.items():
        shares = " ".join(f"{k} {v:.0%}" for k, v in found["shares"].get(name, {}).items())
        print(f"{name:<28}{rate:>12,.0f}{rate / rates['raw physics']:>12.0%}   {shares}")
    if "Stable" not in " ".join(rates):
        print("Stable-Baselines3 is not installed here, and was not run")
    print(f"\ncompiling the preset: {found['compile_s']:.1f} s")
    for row in found.get("sizes", []):
        print(f"{row['simulations']:>6} simulations: physics {row['raw']:>9,.0f}, training {row['training']:>9,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="HalfCheetah-v5", metavar="TASK")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    from apportion.control.cache import enable

    enable()
    found = compare(args.task)
    if args.sizes:
        found["sizes"] = sizes(args.task)
    show(found)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
