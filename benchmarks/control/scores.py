"""Final scores of methods on a task at their presets, several seeds, nothing selected.

    python benchmarks/control/scores.py CartPole-v1 10 ppo grpo dr_grpo ...
    python benchmarks/control/scores.py HalfCheetah-v5 5 ppo --steps 3e6

Each seed trains on its own, for the preset's environment steps unless told otherwise; its score is the mean of 20
deterministic episodes.
Printed: the mean over seeds with a 95% t interval, the worst seed, and the wall-clock of all seeds one after another.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np

from apportion import control
from apportion.control.evaluate import interval
from apportion.core.errors import ApportionWarning


def main(task: str, seeds: int, methods: list[str], steps: int | None) -> None:
    """Print one row a method."""
    print(f"{task}, {seeds} seeds")
    print(f"  {'method':24}{'mean':>8}   {'95% interval':18}{'worst':>8}{'env steps':>12}{'seconds':>9}")
    for method in methods:
        began = time.perf_counter()
        runs = [control.train(method, task, steps, seed=seed) for seed in range(seeds)]
        scores = np.array([run.summary["return_mean"] for run in runs])
        low, high = interval(scores)
        steps = int(np.mean([run.summary["env_steps"] for run in runs]))
        spread = f"{low:.1f} to {high:.1f}"
        seconds = time.perf_counter() - began
        row = f"  {method:24}{scores.mean():8.1f}   {spread:18}{scores.min():8.1f}{steps:12,}{seconds:9.1f}"
        print(row, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ApportionWarning)
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("task")
    parse.add_argument("seeds", type=int)
    parse.add_argument("methods", nargs="+")
    parse.add_argument("--steps", type=lambda text: int(float(text)), help="environment steps of a run")
    given = parse.parse_args()
    main(given.task, given.seeds, given.methods, given.steps)
