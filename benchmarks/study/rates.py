"""Environment steps a second of PPO on one core, by task: the lines of src/apportion/study/rates.toml.

    python benchmarks/study/rates.py CartPole-v1 HalfCheetah-v5 ...

Compilation is left out; the rate is over the second half of a short run.
"""

from __future__ import annotations

import sys

from apportion.study.local import one_core


def rate(task: str, steps: int) -> float:
    """Environment steps a second."""
    import time

    from apportion.control.loop import Loop
    from apportion.control.train import prepare

    loop = Loop(prepare("ppo", task, 2 * steps), 0)
    while loop.env_steps < steps:
        loop.step()
    began, before = time.perf_counter(), int(loop.env_steps)
    while not loop.done:
        loop.step()
    return (int(loop.env_steps) - before) / (time.perf_counter() - began)


if __name__ == "__main__":
    one_core()
    for name in sys.argv[1:]:
        quick = not name.endswith("-v5")
        print(f'"{name}" = {rate(name, 200_000 if quick else 20_000):.2g}'.replace("e+0", "e"), flush=True)
