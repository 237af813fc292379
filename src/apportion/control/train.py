"""The interface in Python: `control.train(methods.ppo, ...)`."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import jax
import numpy as np

from apportion.control.cache import enable
from apportion.control.engine import Engine, Plan, Setup, TrainState
from apportion.control.evaluate import EPISODES, Evaluation, TrainedPolicy, evaluate_policy, find
from apportion.control.host_engine import HostEngine
from apportion.control.hosts import World
from apportion.control.loop import Loop
from apportion.control.periodic import Periodic, check_every
from apportion.control.policy import Parameters
from apportion.control.presets import resolve
from apportion.control.simulators import Simulator
from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.runs.callbacks import Callbacks, RunInfo
from apportion.runs.folder import described, versions
from apportion.runs.seed import check_seed

Overrides = Mapping[str, Any] | Iterable[tuple[str, Any]]

MOST_STEPS = 2_000_000_000
"""Environment steps are counted in int32."""


@dataclass(frozen=True)
class Run:
    """A finished training run.

    summary: what `summary.json` holds. metrics: the log rows. parameters: flat [P], what was trained.
    networks: the same as a pytree, with what observations are normalised by.
    """

    engine: Engine | HostEngine
    seed: int
    parameters: np.ndarray = field(repr=False)
    networks: Parameters = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any]

    @functools.cached_property
    def policy(self) -> TrainedPolicy:
        """The policy to act with."""
        return TrainedPolicy(self.engine.simulator, self.engine.policy, self.networks, self.seed)

    def evaluate(self, episodes: int = EPISODES, seed: int = 0, deterministic: bool = True) -> Evaluation:
        """Whole episodes of the trained policy from fresh start states."""
        p = self.policy
        return evaluate_policy(p.simulator, p.policy, p.networks, episodes, seed, deterministic)


def prepare(
    method: Method | str,
    task: str | Simulator | World,
    steps: int | None = None,
    overrides: Overrides = (),
    setup: Setup | None = None,
) -> Engine | HostEngine:
    """The engine of a method on a task, by the task's preset and then the overrides.

    task: a Gymnasium id, or a simulator of one's own (a world, see `hosts.world_of`, if it runs outside of jit).
    steps: environment steps; None takes the preset's. overrides: (path, value) pairs such as ("sampler.group", 8) or
    ("setup.envs", 16). setup: in place of the preset's. Raises ApportionError for anything that does not exist or does
    not fit.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    world = find(task) if isinstance(task, str) else task
    chosen, given, usual = resolve(method, world.id, pairs)
    steps = usual if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or not 1 <= steps <= MOST_STEPS:
        raise ApportionError(f"steps is {steps!r}; it must be a whole number of environment steps, 1 to {MOST_STEPS:,}")
    given = given if setup is None else setup
    if isinstance(world, World):
        return HostEngine(chosen, world, given, int(steps))
    return Engine(chosen, world, given, int(steps))


def configuration(
    engine: Plan,
    seed: int,
    overrides: list[tuple[str, Any]],
    eval_every: int | None = None,
    episodes: int = EPISODES,
) -> dict[str, Any]:
    """What config.json holds: everything that decides the run and its log, and the versions it was made with."""
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
    if check_every(eval_every) is not None:
        config["evaluation"] = {"every": eval_every, "episodes": episodes}
    return json.loads(json.dumps(config))


def summarise(
    engine: Plan, seed: int, state: dict[str, int], score: Evaluation, clock: dict[str, float]
) -> dict[str, Any]:
    """What `summary.json` holds. state: env_steps and iteration. clock: all seconds of the run until its last step,
    and of them compile_seconds and eval_seconds."""
    training = clock["seconds"] - clock["compile_seconds"] - clock["eval_seconds"]
    return {
        "method": engine.method.name,
        "task": engine.simulator.id,
        "seed": seed,
        **score.summary(),
        **state,
        "wall_seconds": round(clock["seconds"], 3),
        "compile_seconds": round(clock["compile_seconds"], 3),
        "steps_per_second": round(state["env_steps"] / max(training, 1e-9), 1),
    }


@overload
def train(
    method: Method | str,
    task: str | Simulator | World,
    steps: int | None = ...,
    seed: int = ...,
    *,
    seeds: None = ...,
    overrides: Overrides = ...,
    setup: Setup | None = ...,
    episodes: int = ...,
    eval_every: int | None = ...,
    callbacks: Iterable[Any] = ...,
) -> Run: ...
@overload
def train(
    method: Method | str,
    task: str | Simulator | World,
    steps: int | None = ...,
    seed: int = ...,
    *,
    seeds: Sequence[int],
    overrides: Overrides = ...,
    setup: Setup | None = ...,
    episodes: int = ...,
    eval_every: int | None = ...,
    callbacks: Iterable[Any] = ...,
) -> list[Run]: ...
def train(
    method: Method | str,
    task: str | Simulator | World,
    steps: int | None = None,
    seed: int = 0,
    *,
    seeds: Sequence[int] | None = None,
    overrides: Overrides = (),
    setup: Setup | None = None,
    episodes: int = EPISODES,
    eval_every: int | None = None,
    callbacks: Iterable[Any] = (),
) -> Run | list[Run]:
    """Train and return the run, or one run a seed when `seeds` is given (all in one program, side by side).

    method, task, steps, overrides, setup: see `prepare`. episodes: of the evaluation in `summary`. eval_every:
    environment steps between evaluations on the way, whose eval_return_mean is in the metrics. Of many seeds,
    wall_seconds and compile_seconds are those of the whole program and steps_per_second is each one's share.
    callbacks: of a single run, see `runs.callbacks`; when one stops it, what was trained so far is returned.

        run = control.train(methods.ppo, "CartPole-v1", seed=0)
        action, _ = run.policy.predict(observation)
    """
    enable()
    wanted = [check_seed(s) for s in ([seed] if seeds is None else seeds)]
    if not wanted:
        raise ApportionError("seeds is empty; give at least one, such as seeds=[0]")
    began = time.perf_counter()
    told = Callbacks(callbacks)
    engine = prepare(method, task, steps, overrides, setup)
    if seeds is None:
        return _train(engine, wanted[0], episodes, eval_every, began, told)[0]
    if told.all:
        raise ApportionError("callbacks follow one run; give them with seed=, not with seeds=")
    if isinstance(engine, Engine):
        return _train(engine, wanted, episodes, eval_every, began, told)
    return [_train(engine, one, episodes, eval_every, time.perf_counter(), told)[0] for one in wanted]


def _train(
    engine: Engine | HostEngine,
    seeds: int | list[int],
    episodes: int,
    eval_every: int | None,
    began: float,
    callbacks: Callbacks,
) -> list[Run]:
    """The runs of one loop."""
    wanted = [seeds] if isinstance(seeds, int) else seeds
    periodic = [Periodic(engine, eval_every, episodes, one) for one in wanted]
    loop = Loop(engine, seeds)
    metrics: list[list[dict[str, Any]]] = [[] for _ in wanted]

    def networks(i: int) -> Parameters:
        return engine.networks(_state(loop, seeds, i))

    def policy() -> TrainedPolicy:
        return TrainedPolicy(engine.simulator, engine.policy, networks(0), wanted[0])

    name = f"{engine.method.name.partition('[')[0]} {engine.simulator.id}"
    config = configuration(engine, wanted[0], [], eval_every, episodes)
    callbacks("on_start", RunInfo(name, None, config, engine.total_steps, "env_steps", [], policy))
    while not (loop.done or callbacks.stopped):
        for i, row in enumerate(loop.step()):
            if row is not None:
                row = periodic[i].look(row, functools.partial(networks, i))
                metrics[i].append(row)
                callbacks("on_row", row)
    clock = {
        "seconds": time.perf_counter() - began,
        "compile_seconds": loop.compile_seconds,
        "eval_seconds": sum(p.seconds for p in periodic),
    }
    runs = []
    for i, one in enumerate(wanted):
        state, trained = _state(loop, seeds, i), networks(i)
        score = evaluate_policy(engine.simulator, engine.policy, trained, episodes, one)
        about = {"env_steps": int(state.env_steps), "iterations": int(state.iteration)}
        summary = summarise(engine, one, about, score, clock)
        runs.append(Run(engine, one, np.asarray(state.parameters), trained, metrics[i], summary))
    callbacks("on_end", runs[0].summary)
    return runs


def _state(loop: Loop, seeds: int | list[int], i: int) -> TrainState:
    """The state of the loop's run number i, in NumPy."""
    at = () if isinstance(seeds, int) else (i,)
    return jax.tree.map(lambda x: np.asarray(x)[at], loop.carry.state)
