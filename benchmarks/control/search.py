"""The search rule behind `src/apportion/control/presets.toml`: Optuna, the same budget for every method on every task.

For one method on one task: 12 trials of TPE (sampler seed 0; on short tasks --trials 48, for all methods), the first at
the values the preset has now, each training one seed (100) for the task's environment steps; then the best 3 train
seeds 101 and 102 too, and the best mean of three seeds wins. Score of a run: the mean training return over its second
half, each environment step weighing the same. Reported results use seeds from 0, never these. `space` lists what is
searched; all else is the catalogue's and the preset's. Trials are kept in the folder, so that a search that was killed
goes on; two searches can run side by side.

    python benchmarks/control/search.py Hopper-v5 1000000 ppo trpo --out searches

Printed: every trial, and the winner as TOML. Needs optuna (extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from apportion import control
from apportion.control.evaluate import find
from apportion.control.hosts import TASKS
from apportion.control.presets import resolve
from apportion.core.catalogue import method as entry
from apportion.core.errors import ApportionError, ApportionWarning
from apportion.core.parts import NoRatio
from apportion.core.update import NaturalGradient

TRIALS, FINALISTS, SEEDS = 12, 3, (100, 101, 102)
Setting = dict[str, Any]
Space = dict[str, tuple[Any, ...]]


def space(name: str, task: str) -> Space:
    """What is searched, by path: the choices of each, or "log" and two ends.

    "decisions" of a minibatch stand for `sampler.minibatches`, which follows from them and the collection's size.
    """
    m, world = entry(name), find(task)
    natural, once = isinstance(m.update, NaturalGradient), isinstance(m.ratio, NoRatio)
    rate = "value_loss.learning_rate" if natural else "update.learning_rate"
    found: Space = {rate: ("log", 1e-4, 3e-3 if task in TASKS else 1e-2)}
    if m.sampler.start == "stream":
        found["setup.envs"] = (8, 16, 32, 64)
        found["sampler.horizon"] = (5, 8, 16, 32, 64, 128) if once else (32, 64, 128, 256)
        found["credit.gamma"] = (0.98, 0.99, 0.995, 0.999)
        found["credit.lam"] = (0.9, 0.95, 0.98, 1.0)
    else:
        found["setup.envs"] = (2, 4, 8) if m.sampler.group > 1 or m.sampler.greedy else (8, 16, 32)
        if m.sampler.group > 1:
            found["sampler.group"] = (4, 8, 16)
    if not once:
        found["sampler.epochs"] = (1, 4, 10, 20)
        found["decisions"] = (64, 128, 256, 512)
    if natural:
        found["update.delta"] = (0.01, 0.02, 0.04)
    if not world.action_count:
        found["setup.log_std"] = (-2.0, -1.0, -0.5, 0.0)
    if task in TASKS:
        found["setup.activation"] = ("tanh", "relu")
    else:
        found["entropy"] = (0.0, 0.003, 0.01, 0.03)
    return found


def settings(values: Setting, horizon: int) -> Setting:
    """Values of a trial as overrides. horizon: the longest episode, for collections that are not segments."""
    out = dict(values)
    if (decisions := out.pop("decisions", None)) is not None:
        size = out["setup.envs"] * out.get("sampler.horizon", horizon) * out.get("sampler.group", 1)
        out["sampler.minibatches"] = max(1, size // decisions)
    return out


def now(name: str, task: str, wanted: Space) -> Setting:
    """The preset's values of what is searched, each at the nearest that the space has."""
    method, setup, _ = resolve(name, task)

    def value(path: str) -> Any:
        at: Any = {"setup": setup} if path.startswith("setup.") else method
        for part in path.split("."):
            at = at[part] if isinstance(at, dict) else getattr(at, part)
        return at

    out: Setting = {}
    for path, (first, *rest) in wanted.items():
        if path == "decisions":
            size = setup.envs * (method.sampler.horizon or find(task).horizon) * method.sampler.group
            found: Any = size / method.sampler.minibatches
        else:
            found = value(path)
        if first == "log":
            out[path] = min(max(found, rest[0]), rest[1])
        elif isinstance(first, str):
            out[path] = found
        else:
            out[path] = min((first, *rest), key=lambda choice, found=found: abs(choice - found))
    return out


def run(name: str, task: str, steps: int, setting: Setting, seed: int) -> float:
    """A run's score; what diverges, cannot be built or ends no episode scores -inf."""
    try:
        made = control.train(name, task, steps, seed, overrides=setting, episodes=1)
    except ApportionError as error:
        print(f"#   {error}", flush=True)
        return -math.inf
    rows = [(row["env_steps"], row["return_mean"]) for row in made.metrics if row["return_mean"] is not None]
    if not rows or rows[-1][0] <= steps / 2:
        return -math.inf
    at, returns = np.array(rows).T
    width = np.diff(at, prepend=0.0) * (at > steps / 2)
    return float(np.sum(width * returns) / np.sum(width))


class Search:
    """One method on one task; its trials stand in a file as they come."""

    def __init__(self, name: str, task: str, steps: int, trials: int, folder: Path) -> None:
        self.name, self.task, self.steps, self.trials = name, task, steps, trials
        self.wanted, self.horizon = space(name, task), find(task).horizon
        self.file = folder / f"{name}-{task}-{steps}.jsonl"
        self.done: dict[tuple[str, int], float] = {}
        if self.file.exists():
            for line in map(json.loads, self.file.read_text().splitlines()):
                self.done[json.dumps(line["setting"]), line["seed"]] = line["score"]

    def score(self, setting: Setting, seed: int) -> float:
        """The score of a run, from the file if it is there."""
        key = (json.dumps(setting), seed)
        if key not in self.done:
            began = time.perf_counter()
            self.done[key] = run(self.name, self.task, self.steps, settings(setting, self.horizon), seed)
            row = {"setting": setting, "seed": seed, "score": self.done[key]}
            with open(self.file, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"# {len(self.done)} {self.done[key]:10.1f} {setting} ({time.perf_counter() - began:.0f} s)", flush=True
            )
        return self.done[key]

    def suggest(self, trial: optuna.Trial) -> Setting:
        """The trial's setting."""
        return {
            path: trial.suggest_float(path, *rest, log=True)
            if first == "log"
            else trial.suggest_categorical(path, (first, *rest))
            for path, (first, *rest) in self.wanted.items()
        }

    def best(self) -> tuple[float, Setting]:
        """The winner and its mean score over all search seeds."""
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        study.enqueue_trial(now(self.name, self.task, self.wanted))
        study.optimize(lambda trial: self.score(self.suggest(trial), SEEDS[0]), n_trials=self.trials)
        ranked = sorted(study.trials, key=lambda t: -(t.value if t.value is not None else -math.inf))
        finalists = list({json.dumps(t.params): t.params for t in ranked}.values())[:FINALISTS]
        means = [float(np.mean([self.score(setting, seed) for seed in SEEDS])) for setting in finalists]
        at = int(np.argmax(means))
        return means[at], finalists[at]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("steps", type=lambda text: int(float(text)))
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each method; the same for all on a task")
    parser.add_argument("--out", type=Path, default=Path("searches"), help="where trials are kept (default: searches)")
    args = parser.parse_args()
    warnings.simplefilter("ignore", ApportionWarning)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.methods:
        search = Search(name, args.task, args.steps, args.trials, args.out)
        score, best = search.best()
        print(f'["{name}/{args.task}"]  # {score:.1f}, the mean of 3 seeds, {args.trials} trials')
        print(f"steps = {args.steps}")
        for path, value in settings(best, search.horizon).items():
            print(f'"{path}" = {json.dumps(round(value, 6) if isinstance(value, float) else value)}')
        print(flush=True)


if __name__ == "__main__":
    main()
