"""Returns of PPO with few passes over large collections beside those of Stable-Baselines3 at its defaults, same steps.

    pip install -e ".[mujoco,bench]" torch==2.13.0 && python benchmarks/control/returns.py [TASK] [--seeds N] [--peer N]

Ours are the settings of `FEWER_PASSES` in halfcheetah.py, whose speed that file measures. Every seed trains a million
steps; its return is the mean of 20 deterministic episodes of the final policy. Nothing is selected.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
from halfcheetah import FEWER_PASSES

EPISODES = 20


def ours(task: str, steps: int, seed: int) -> float:
    from apportion import control

    run = control.train("ppo", task, steps, seed, overrides=FEWER_PASSES, episodes=EPISODES)
    return float(run.summary["return_mean"])


def stable_baselines(task: str, steps: int, seed: int) -> float:
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy

    model = PPO("MlpPolicy", task, device="cpu", seed=seed).learn(steps)
    return float(evaluate_policy(model, model.get_env(), EPISODES, deterministic=True)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="HalfCheetah-v5", metavar="TASK")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=5, help="of ours")
    parser.add_argument("--peer", type=int, default=3, help="seeds of Stable-Baselines3")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    programs: list[tuple[str, Callable[[str, int, int], float], int]] = [
        ("fewer passes", ours, args.seeds),
        ("Stable-Baselines3, defaults", stable_baselines, args.peer),
    ]
    print(f"{args.task}, {args.steps:,} steps")
    for name, train, seeds in programs:
        if not seeds:
            continue
        began = time.perf_counter()
        returns = [train(args.task, args.steps, seed) for seed in range(seeds)]
        told = ", ".join(f"{x:,.0f}" for x in returns)
        print(f"  {name:28} mean {np.mean(returns):8,.0f} of {told} ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
