"""The search rule behind `src/apportion/control/presets.toml`: the same for every method.

For each method, 12 trials drawn without replacement (seed 0) from its grid: learning rate {3e-4, 1e-3, 3e-3, 1e-2},
simulations per collection {small, medium, large} and reuse {once, 4 epochs x 4 minibatches} (reuse only where an
importance ratio allows it). Each trial trains 2 seeds for the same environment steps. Score: the mean, over both
seeds and the whole run, of the training return (area under the learning curve). The best trial is printed as TOML.

    python benchmarks/control/tune.py CartPole-v1 150000 rloo grpo ...
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from typing import Any

import jax
import numpy as np

from apportion.control.engine import Engine
from apportion.control.presets import resolve
from apportion.control.simulators import simulator
from apportion.core.catalogue import method
from apportion.core.errors import ApportionWarning
from apportion.core.parts import NoRatio

TRIALS, SEEDS = 12, 2
RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def grid(name: str) -> list[dict[str, Any]]:
    """All settings of a method's grid, as (path, value) dictionaries."""
    m = method(name)
    if m.sampler.start == "stream":
        sizes: list[dict[str, Any]] = [{"setup.envs": e, "sampler.horizon": t} for e, t in ((8, 8), (8, 32), (32, 32))]
    elif m.sampler.group > 1 or m.sampler.greedy:
        sizes = [{"setup.envs": n, "sampler.group": 8 if m.sampler.group > 1 else 1} for n in (2, 4, 8)]
    else:
        sizes = [{"setup.envs": n} for n in (8, 16, 32)]
    reuse = [{"sampler.epochs": 1, "sampler.minibatches": 1}]
    if not isinstance(m.ratio, NoRatio):
        reuse.append({"sampler.epochs": 4, "sampler.minibatches": 4})
    rates = [{"update.learning_rate": r} for r in RATES]
    return [a | b | c for a, b, c in itertools.product(sizes, reuse, rates)]


def score(name: str, task: str, steps: int, setting: dict[str, Any], seed: int) -> float:
    """Mean training return over the run, each environment step weighing the same."""
    chosen, setup, _ = resolve(name, task, setting.items())
    engine = Engine(chosen, simulator(task), setup, steps)
    iterate, state = jax.jit(engine.iterate), engine.init(seed)
    at, curve = 0, []
    while at < steps:
        state, metrics = iterate(state)
        now, ended = int(state.env_steps), int(metrics.finished.episodes)
        last = float(metrics.finished.total) / ended if ended else (curve[-1][1] if curve else np.nan)
        curve.append((now - at, last))
        at = now
    taken, returns = np.array(curve).T
    known = ~np.isnan(returns)
    return float(np.sum(taken[known] * returns[known]) / np.sum(taken[known]))


def tune(name: str, task: str, steps: int) -> None:
    """Print the method's trials and its best as TOML."""
    settings = grid(name)
    drawn = np.random.default_rng(0).permutation(len(settings))[:TRIALS]
    results = []
    for k, i in enumerate(drawn):
        began = time.perf_counter()
        value = float(np.mean([score(name, task, steps, settings[i], seed) for seed in range(SEEDS)]))
        results.append((value, settings[i]))
        seconds = time.perf_counter() - began
        left = seconds * (len(drawn) - k - 1)
        print(
            f"# {name} {k + 1}/{len(drawn)} {value:8.1f} {settings[i]} ({seconds:.1f} s, {left:.0f} s left)", flush=True
        )
    value, best = max(results, key=lambda r: r[0])
    print(f'["{name}/{task}"]  # area under the curve {value:.1f}')
    for path, setting in best.items():
        print(f'"{path}" = {setting}')
    print(flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ApportionWarning)
    for method_name in sys.argv[3:]:
        tune(method_name, sys.argv[1], int(sys.argv[2]))
