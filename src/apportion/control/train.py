"""Training loops around the engine's one iteration, and the interface in Python: `control.train(methods.ppo, ...)`.

A log row covers the iterations up to the next multiple of `spacing` environment steps. The program that runs them
carries their sums along, so that it may be left and entered at any iteration without changing a bit.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control import checkpoint
from apportion.control.cache import COMPILER_OPTIONS, enable
from apportion.control.collect import Finished
from apportion.control.engine import Engine, Metrics, Setup, TrainState
from apportion.control.evaluate import EPISODES, Evaluation, TrainedPolicy, evaluate, evaluate_policy
from apportion.control.learn import Signals
from apportion.control.presets import resolve
from apportion.control.simulators import Simulator, simulator
from apportion.core.errors import ApportionError
from apportion.core.method import Method

Overrides = Mapping[str, Any] | Iterable[tuple[str, Any]]

ROWS = 200
"""Log rows of a run."""
MOST_STEPS = 2_000_000_000
"""Environment steps are counted in int32."""


class Tally(NamedTuple):
    """Sums over the iterations since the last log row; each [] or, for many seeds, [S].

    learning_rate: of the latest iteration. bad: the first iteration that left a non-finite number, or -1.
    """

    iterations: Any
    finished: Finished
    signals: Signals
    explained_variance: Any
    kept: Any
    learning_rate: Any
    bad: Any


class Carry(NamedTuple):
    """All that the next iteration and the next log row depend on; plain arrays, so that it is a checkpoint.

    state: with its random key as raw data. tally: sums since the last row.
    """

    state: TrainState
    tally: Tally


def blank(shape: tuple[int, ...] = ()) -> Tally:
    """The tally of no iteration, in NumPy."""
    zero: Any = np.zeros(shape, np.float32)
    count: Any = np.zeros(shape, np.int32)
    return Tally(count, Finished(count, zero, count), Signals(*[zero] * 5), zero, zero, zero, count - 1)


def begin(engine: Engine, seed: jax.Array) -> Carry:
    """The carry before the first iteration."""
    state = engine.init(seed)
    return Carry(state._replace(key=jax.random.key_data(state.key)), jax.tree.map(jnp.asarray, blank()))


def turn(engine: Engine, carry: Carry) -> Carry:
    """One iteration, and its numbers added to the tally."""
    state, tally = carry
    state, metrics = engine.iterate(state._replace(key=jax.random.wrap_key_data(state.key)))
    finite = jnp.isfinite(jnp.sum(state.parameters)) & jnp.isfinite(metrics.signals.grad_norm)
    bad = jnp.where((tally.bad < 0) & ~finite, state.iteration, tally.bad)
    return Carry(state._replace(key=jax.random.key_data(state.key)), _add(tally, metrics, bad))


def _add(tally: Tally, m: Metrics, bad: jax.Array) -> Tally:
    return Tally(
        tally.iterations + 1,
        jax.tree.map(lambda a, b: a + b.astype(a.dtype), tally.finished, m.finished),
        jax.tree.map(jnp.add, tally.signals, m.signals),
        tally.explained_variance + m.explained_variance,
        tally.kept + m.kept,
        jnp.asarray(m.learning_rate, jnp.float32),
        bad,
    )


def advance(engine: Engine, carry: Carry, boundary: jax.Array, most: jax.Array) -> Carry:
    """Iterations until `boundary` environment steps are reached, at most `most` of them.

    Under vmap, seeds that have reached theirs stay as they are while the others go on.
    """

    def going(at: tuple[Carry, jax.Array]) -> jax.Array:
        (state, tally), done = at
        return (state.env_steps < boundary) & (done < most) & (tally.bad < 0)

    def body(at: tuple[Carry, jax.Array]) -> tuple[Carry, jax.Array]:
        return turn(engine, at[0]), at[1] + 1

    return jax.lax.while_loop(going, body, (carry, jnp.zeros((), jnp.int32)))[0]


class Loop:
    """A run (or S runs, one a seed, in one program) between its log rows.

    carry: where it stands. compile_seconds: what tracing and compiling took (or loading from the cache).
    restore: what gives the carry to go on from, from a template of its shapes and dtypes; None begins anew.
    """

    def __init__(
        self, engine: Engine, seeds: int | Sequence[int], restore: Callable[[Carry], Carry] | None = None
    ) -> None:
        started = time.perf_counter()
        self.engine = engine
        self.shape = () if isinstance(seeds, int) else (len(seeds),)
        self.spacing = max(1, math.ceil(engine.total_steps / ROWS))
        self._most, self._boundary = 1, None
        first, step = functools.partial(begin, engine), functools.partial(advance, engine)
        if self.shape:
            first, step = jax.vmap(first), jax.vmap(step, in_axes=(0, 0, None))
        start = jax.jit(first).trace(jax.ShapeDtypeStruct(self.shape, np.uint32))
        template: Carry = start.out_info
        if restore is None:
            self.carry: Carry = start.lower().compile(COMPILER_OPTIONS)(np.asarray(seeds, np.uint32))
        else:
            self.carry = restore(template)
        until, most = jax.ShapeDtypeStruct(self.shape, np.int32), jax.ShapeDtypeStruct((), np.int32)
        self._step = jax.jit(step).lower(template, until, most).compile(COMPILER_OPTIONS)
        self.compile_seconds = time.perf_counter() - started

    @property
    def env_steps(self) -> np.ndarray:
        """Environment steps taken so far, [] or [S]."""
        return np.asarray(self.carry.state.env_steps)

    @property
    def iterations(self) -> np.ndarray:
        """Iterations made so far, [] or [S]."""
        return np.asarray(self.carry.state.iteration)

    @property
    def done(self) -> bool:
        """Whether every seed has reached the run's steps."""
        return bool(np.all(self.env_steps >= self.engine.total_steps))

    def step(self, seconds: float = 0.2) -> list[dict[str, Any] | None]:
        """Train for about that long, or up to the next log row.

        Returns the row of each seed (None for one that was done before) when all have reached theirs, else nothing.
        Raises ApportionError naming the iteration that left a non-finite number.
        """
        if self._boundary is None:
            following = (self.env_steps // self.spacing + 1) * self.spacing
            self._boundary = np.minimum(following, self.engine.total_steps).astype(np.int32)
        before, started = self.iterations, time.perf_counter()
        carry = self._step(self.carry, self._boundary, np.int32(self._most))
        _refuse_non_finite(self.engine, carry)
        self.carry = carry
        # How many iterations a call makes changes nothing but how soon it answers.
        pace = max(1, int(np.max(self.iterations - before))) / (time.perf_counter() - started)
        self._most = int(np.clip(pace * seconds, 1, 4 * self._most))
        if np.any(self.env_steps < self._boundary):
            return []
        rows = [_row(self.carry, at) for at in np.ndindex(self.shape)]
        self._boundary = None
        self.carry = self.carry._replace(tally=blank(self.shape))
        return rows


def _refuse_non_finite(engine: Engine, carry: Carry) -> None:
    bad = np.asarray(carry.tally.bad)
    if np.any(bad >= 0):
        at = int(np.max(bad))
        raise ApportionError(
            f"{engine.method.name} on {engine.simulator.id}: a gradient or parameter became non-finite in "
            f"iteration {at}; lower update.learning_rate or set update.max_grad_norm"
        )


def number(x: Any) -> float | None:
    """A float32 as the shortest decimal that reads back as it; None when it is not finite."""
    return float(str(np.float32(x))) if np.isfinite(x) else None


def _row(carry: Carry, at: tuple[int, ...]) -> dict[str, Any] | None:
    state, tally = carry.state, jax.tree.map(lambda x: np.asarray(x)[at], carry.tally)
    count, ended = int(tally.iterations), tally.finished
    if not count:
        return None
    per_episode = 1 / np.float32(ended.episodes) if ended.episodes else np.float32(np.nan)
    return {
        "env_steps": int(np.asarray(state.env_steps)[at]),
        "iteration": int(np.asarray(state.iteration)[at]),
        "episodes": int(ended.episodes),
        "return_mean": number(ended.total * per_episode),
        "length_mean": number(ended.length * per_episode),
        **{name: number(x / np.float32(count)) for name, x in tally.signals._asdict().items()},
        "explained_variance": number(tally.explained_variance / np.float32(count)),
        "learning_rate": number(tally.learning_rate),
        "kept": number(tally.kept / np.float32(count)),
    }


@dataclass(frozen=True)
class Run:
    """A finished training run.

    summary: what `summary.json` holds. metrics: the log rows. parameters: flat [P].
    """

    engine: Engine
    seed: int
    parameters: np.ndarray = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any]

    @functools.cached_property
    def policy(self) -> TrainedPolicy:
        """The policy to act with."""
        networks = checkpoint.unflatten(self.engine.policy, self.parameters)
        return TrainedPolicy(self.engine.simulator, self.engine.policy, networks, self.seed)

    def evaluate(self, episodes: int = EPISODES, seed: int = 0, deterministic: bool = True) -> Evaluation:
        """Whole episodes of the trained policy from fresh start states."""
        p = self.policy
        return evaluate_policy(p.simulator, p.policy, p.networks, episodes, seed, deterministic)


def check_seed(seed: Any) -> int:
    """The seed as an int. Raises ApportionError for anything but a whole number from 0 to 2^32 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ApportionError(f"seed is {seed!r}; it must be a whole number from 0 to {2**32 - 1}")
    return int(seed)


def prepare(
    method: Method | str,
    task: str | Simulator,
    steps: int | None = None,
    overrides: Overrides = (),
    setup: Setup | None = None,
) -> Engine:
    """The engine of a method on a task, by the task's preset and then the overrides.

    task: a Gymnasium id, or a simulator of one's own. steps: environment steps; None takes the
    preset's. overrides: (path, value) pairs such as ("sampler.group", 8) or ("setup.envs", 16). setup: in place of
    the preset's. Raises ApportionError for anything that does not exist or does not fit.
    """
    pairs = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    world = task if isinstance(task, Simulator) else simulator(task)
    chosen, given, usual = resolve(method, world.id, pairs)
    steps = usual if steps is None else steps
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or not 1 <= steps <= MOST_STEPS:
        raise ApportionError(f"steps is {steps!r}; it must be a whole number of environment steps, 1 to {MOST_STEPS:,}")
    return Engine(chosen, world, given if setup is None else setup, int(steps))


def summarise(
    engine: Engine, seed: int, state: dict[str, int], score: Evaluation, seconds: float, compiling: float
) -> dict[str, Any]:
    """What `summary.json` holds. state: env_steps and iteration. seconds: all, the `compiling` ones included."""
    return {
        "method": engine.method.name,
        "task": engine.simulator.id,
        "seed": seed,
        **score.summary(),
        **state,
        "wall_seconds": round(seconds, 3),
        "compile_seconds": round(compiling, 3),
        "steps_per_second": round(state["env_steps"] / max(seconds - compiling, 1e-9), 1),
    }


@overload
def train(
    method: Method | str,
    task: str | Simulator,
    steps: int | None = ...,
    seed: int = ...,
    *,
    seeds: None = ...,
    overrides: Overrides = ...,
    setup: Setup | None = ...,
    episodes: int = ...,
) -> Run: ...
@overload
def train(
    method: Method | str,
    task: str | Simulator,
    steps: int | None = ...,
    seed: int = ...,
    *,
    seeds: Sequence[int],
    overrides: Overrides = ...,
    setup: Setup | None = ...,
    episodes: int = ...,
) -> list[Run]: ...
def train(
    method: Method | str,
    task: str | Simulator,
    steps: int | None = None,
    seed: int = 0,
    *,
    seeds: Sequence[int] | None = None,
    overrides: Overrides = (),
    setup: Setup | None = None,
    episodes: int = EPISODES,
) -> Run | list[Run]:
    """Train and return the run, or one run a seed when `seeds` is given (all in one program, side by side).

    method, task, steps, overrides, setup: see `prepare`. episodes: of the evaluation in `summary`. Of many seeds,
    wall_seconds and compile_seconds are those of the whole program and steps_per_second is each one's share.

        run = control.train(methods.ppo, "CartPole-v1", seed=0)
        action, _ = run.policy.predict(observation)
    """
    enable()
    began = time.perf_counter()
    engine = prepare(method, task, steps, overrides, setup)
    wanted = [check_seed(s) for s in ([seed] if seeds is None else seeds)]
    if not wanted:
        raise ApportionError("seeds is empty; give at least one, such as seeds=[0]")
    loop = Loop(engine, wanted[0] if seeds is None else wanted)
    metrics: list[list[dict[str, Any]]] = [[] for _ in wanted]
    while not loop.done:
        for log, row in zip(metrics, loop.step(), strict=False):
            if row is not None:
                log.append(row)
    seconds = time.perf_counter() - began
    runs = []
    for i, one in enumerate(wanted):
        at = (i,) if seeds is not None else ()
        flat = np.asarray(loop.carry.state.parameters)[at]
        score = evaluate(engine, flat, episodes, one)
        state = {"env_steps": int(loop.env_steps[at]), "iterations": int(loop.iterations[at])}
        summary = summarise(engine, one, state, score, seconds, loop.compile_seconds)
        runs.append(Run(engine, one, flat, metrics[i], summary))
    return runs if seeds is not None else runs[0]
