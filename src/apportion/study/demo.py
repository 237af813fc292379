"""The demo: five methods on CartPole-v1 and on the toy language, side by side, with a table and a report."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from apportion.core import catalogue
from apportion.core.method import Method
from apportion.core.parts import KL, NoKL
from apportion.study.local import one_core

CARTPOLE, LANGUAGE = "CartPole-v1", "toy"
SEEDS = (0, 1, 2)
STEPS = 150_000
UPDATES = 1_000
MEASURED = ("kl_to_optimum", "expected_reward")
Progress = Callable[[int, int], None]
Job = tuple[int, str]
"""Place in CONTESTANTS, and task."""


@dataclass(frozen=True)
class Contestant:
    """One method, as it runs on each task. control: its name. rate: step size on the language."""

    label: str
    control: str
    language: Method
    rate: float = 0.05


def _towards_optimum(method: Method) -> Method:
    """With the KL to the reference in the reward where the method declares none: all then have the target pi*."""
    return method.replace(name=method.name, kl=KL("reward", "k1")) if isinstance(method.kl, NoKL) else method


CONTESTANTS = (
    Contestant("PPO", "ppo", catalogue.ppo_rlhf, rate=0.02),
    *(
        Contestant(label, method.name, _towards_optimum(method))
        for label, method in {
            "REINFORCE": catalogue.reinforce_batch_mean,
            "RLOO": catalogue.rloo,
            "GRPO": catalogue.grpo,
            "Dr. GRPO": catalogue.dr_grpo,
        }.items()
    ),
)


@dataclass(frozen=True)
class Result:
    """One method on one task, over all seeds.

    x: [K], steps at which `curves` (name -> [seeds, K]) were measured. score: [seeds] final numbers by name.
    """

    label: str
    task: str
    x: np.ndarray
    curves: dict[str, np.ndarray]
    score: dict[str, np.ndarray]
    env_steps: int
    wall_seconds: float
    compile_seconds: float = 0.0


def on_language(who: Contestant, steps: int, seeds: tuple[int, ...], progress: Progress) -> Result:
    """Train on the exact language; every curve is exact."""
    from apportion.toy.language import language
    from apportion.toy.train import preset, train

    method = preset(who.language, learning_rate=who.rate)
    started, histories = time.perf_counter(), []
    for i, seed in enumerate(seeds):

        def tell(step: int, of: int, _: Any, done: int = i * steps) -> None:
            progress(done + step, of * len(seeds))

        histories.append(train(method, language(LANGUAGE), steps, seed, callback=tell))
    curves = {name: np.stack([h[name] for h in histories]) for name in MEASURED}
    score = {name: curve[:, -1] for name, curve in curves.items()}
    return Result(who.label, LANGUAGE, histories[0]["step"], curves, score, 0, time.perf_counter() - started)


def on_cartpole(who: Contestant, steps: int, seeds: tuple[int, ...], progress: Progress) -> Result:
    """Train all seeds in one program; the curve is the mean return of the episodes that ended since the last row."""
    from apportion.control.cache import enable
    from apportion.control.evaluate import evaluate
    from apportion.control.loop import Loop
    from apportion.control.train import prepare

    enable()
    started = time.perf_counter()
    engine = prepare(who.control, CARTPOLE, steps)
    loop = Loop(engine, list(seeds))
    logs: list[list[dict[str, Any]]] = [[] for _ in seeds]
    while not loop.done:
        for log, row in zip(logs, loop.step(), strict=False):
            if row is not None and row["return_mean"] is not None:
                log.append(row)
        progress(int(np.minimum(loop.env_steps, steps).sum()), steps * len(seeds))
    x = np.linspace(0, steps, 101)[1:]
    curves = [np.interp(x, [r["env_steps"] for r in log], [r["return_mean"] for r in log]) for log in logs]
    parameters = np.asarray(loop.carry.state.parameters)
    final = [evaluate(engine, flat, seed=seed).returns.mean() for flat, seed in zip(parameters, seeds, strict=True)]
    return Result(
        who.label,
        CARTPOLE,
        x,
        {"return": np.stack(curves)},
        {"return": np.array(final)},
        int(loop.env_steps.sum()),
        time.perf_counter() - started,
        loop.compile_seconds,
    )


_queue: Any = None
"""In a worker: where it tells how far it is."""


def _start(queue: Any) -> None:
    """Prepare a worker: it keeps to one core, and an interrupt ends it without a word."""
    global _queue
    _queue = queue
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    one_core()


def _work(job: Job, steps: int, seeds: tuple[int, ...]) -> Result:
    """One job, in a worker."""
    _queue.put((job, 0, steps * len(seeds)))
    last = 0.0

    def progress(done: int, of: int) -> None:
        nonlocal last
        if done >= of or time.monotonic() - last > 0.2:
            last = time.monotonic()
            _queue.put((job, done, of))

    index, task = job
    run = on_cartpole if task == CARTPOLE else on_language
    return run(CONTESTANTS[index], steps, seeds, progress)


def compete(steps: int = STEPS, updates: int = UPDATES, seeds: tuple[int, ...] = SEEDS) -> list[Result]:
    """Run every contestant on both tasks, a process a core, with live progress; results in the order of the table."""
    from apportion.study.progress import live

    jobs: list[Job] = [(i, task) for task in (CARTPOLE, LANGUAGE) for i in range(len(CONTESTANTS))]
    sizes = {CARTPOLE: steps, LANGUAGE: updates}
    places = {CARTPOLE: "CartPole", LANGUAGE: "language"}
    bars = {(i, task): (f"{CONTESTANTS[i].label} on {places[task]}", sizes[task] * len(seeds)) for i, task in jobs}
    context = get_context("spawn")
    queue = context.Queue()
    workers = max(1, min(os.cpu_count() or 1, len(jobs)))
    with live(bars) as shown, ProcessPoolExecutor(workers, context, _start, (queue,)) as pool:
        waiting = {pool.submit(_work, job, sizes[job[1]], seeds): job for job in jobs}
        results: dict[Job, Result] = {}
        try:
            while waiting:
                finished, _ = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                _drain(queue, shown)
                for future in finished:
                    job = waiting.pop(future)
                    results[job] = future.result()
                    shown.finish(job)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise
    return [results[job] for job in jobs]


def _drain(queue: Any, shown: Any) -> None:
    with suppress(Empty):
        while True:
            shown.update(*queue.get_nowait())


def demo(out: Path, steps: int = STEPS, updates: int = UPDATES, seeds: tuple[int, ...] = SEEDS) -> Path:
    """Run the contest, print its table and write `out/report.html`; returns the report's path."""
    from apportion.study import pages

    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    results = compete(steps, updates, seeds)
    seconds = time.perf_counter() - started
    pages.show(results, len(seeds))
    report = out / "report.html"
    report.write_text(pages.demo_page(results, seeds, seconds), encoding="utf-8")
    print(f"\n{seconds:.0f} s in all; report: {report}")
    return report
