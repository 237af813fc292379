"""The loop around an engine's one iteration, from log row to log row.

A log row covers the iterations up to the next multiple of `spacing` environment steps. The program that runs them
carries their sums along, so that it may be left and entered at any iteration without changing a bit.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control.cache import COMPILER_OPTIONS
from apportion.control.collect import Finished
from apportion.control.engine import Engine, Metrics, Plan, TrainState
from apportion.control.host_engine import HostEngine
from apportion.control.learn import Signals
from apportion.core.errors import ApportionError, ApportionWarning, Diverged

ROWS = 200
"""Log rows of a run."""


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


def _carried(state: TrainState, tally: Tally) -> Carry:
    """The carry of a state as engines have it: the random key becomes plain data."""
    return Carry(state._replace(key=jax.random.key_data(state.key)), tally)


def _state(carry: Carry) -> TrainState:
    """The state as engines have it: with a typed random key."""
    return carry.state._replace(key=jax.random.wrap_key_data(carry.state.key))


def begin(engine: Engine | HostEngine, seed: Any) -> Carry:
    """The carry before the first iteration."""
    return _carried(engine.init(seed), jax.tree.map(jnp.asarray, blank()))


def turn(engine: Engine, carry: Carry) -> Carry:
    """One iteration, and its numbers added to the tally."""
    state, metrics = engine.iterate(_state(carry))
    return _carried(state, count(carry.tally, metrics, state.parameters, state.iteration))


def count(tally: Tally, metrics: Metrics, parameters: jax.Array, iteration: jax.Array) -> Tally:
    """The tally with one more iteration, whose number and resulting parameters are given."""
    finite = jnp.isfinite(jnp.sum(parameters)) & jnp.isfinite(metrics.signals.grad_norm)
    return _add(tally, metrics, jnp.where((tally.bad < 0) & ~finite, iteration, tally.bad))


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


class Programs(NamedTuple):
    """What a loop calls.

    template: shapes and dtypes of a carry. start: () -> carry before the first iteration. step: (carry, boundary,
    most) -> carry, as `advance`.
    """

    template: Carry
    start: Callable[[], Carry]
    step: Callable[[Carry, Any, Any], Carry]


def jitted(engine: Engine, seeds: int | Sequence[int]) -> Programs:
    """A loop as two XLA programs, over all seeds at once."""
    shape = () if isinstance(seeds, int) else (len(seeds),)
    first, step = functools.partial(begin, engine), functools.partial(advance, engine)
    if shape:
        first, step = jax.vmap(first), jax.vmap(step, in_axes=(0, 0, None))
    start = jax.jit(first).trace(jax.ShapeDtypeStruct(shape, np.uint32))
    template: Carry = start.out_info
    until, most = jax.ShapeDtypeStruct(shape, np.int32), jax.ShapeDtypeStruct((), np.int32)
    program = jax.jit(step).lower(template, until, most).compile(COMPILER_OPTIONS)
    return Programs(template, lambda: start.lower().compile(COMPILER_OPTIONS)(np.asarray(seeds, np.uint32)), program)


def hosted(engine: HostEngine, seed: int) -> Programs:
    """A loop in Python around an engine outside of jit."""
    first = begin(engine, seed)
    tally = jax.jit(count)

    def step(carry: Carry, boundary: Any, most: Any) -> Carry:
        state, sums = _state(carry), carry.tally
        for _ in range(most):
            if state.env_steps >= boundary or sums.bad >= 0:
                break
            state, metrics = engine.iterate(state)
            sums = tally(sums, metrics, state.parameters, state.iteration)
        return _carried(state, sums)

    engine.compile(_state(first))
    return Programs(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), first), lambda: first, step)


class Standing:
    """Where a run stands: `carry` holds a TrainState as `state`, of one seed [] or of several [S]."""

    carry: Any

    def __init__(self, engine: Plan) -> None:
        self.engine = engine
        self.spacing = max(1, math.ceil(engine.total_steps / ROWS))

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

    def boundary(self) -> np.ndarray:
        """Environment steps of the next log row, [] or [S]."""
        following = (self.env_steps // self.spacing + 1) * self.spacing
        return np.minimum(following, self.engine.total_steps).astype(np.int32)


class Loop(Standing):
    """A run (or S runs, one a seed, in one program) between its log rows.

    carry: where it stands. compile_seconds: what tracing and compiling took (or loading from the cache).
    restore: what gives the carry to go on from, from a template of its shapes and dtypes; None begins anew.
    """

    def __init__(
        self, engine: Plan, seeds: int | Sequence[int], restore: Callable[[Carry], Carry] | None = None
    ) -> None:
        started = time.perf_counter()
        super().__init__(engine)
        self.shape = () if isinstance(seeds, int) else (len(seeds),)
        self._most = 1
        self._boundary: np.ndarray | None = None
        programs = _programs(engine, seeds)
        self.carry = programs.start() if restore is None else restore(programs.template)
        if restore is not None and isinstance(engine, HostEngine):
            _revive(engine, self.carry)
        self._step = programs.step
        self.compile_seconds = time.perf_counter() - started

    def step(self, seconds: float = 0.2) -> list[dict[str, Any] | None]:
        """Train for about that long, or up to the next log row.

        Returns the row of each seed (None for one that was done before) when all have reached theirs, else nothing.
        Raises Diverged naming the iteration that left a non-finite number.
        """
        if self._boundary is None:
            self._boundary = self.boundary()
        before, started = self.iterations, time.perf_counter()
        carry = self._step(self.carry, self._boundary, np.int32(self._most))
        refuse_non_finite(self.engine, carry.tally)
        self.carry = carry
        # How many iterations a call makes changes nothing but how soon it answers.
        pace = max(1, int(np.max(self.iterations - before))) / (time.perf_counter() - started)
        self._most = int(np.clip(pace * seconds, 1, 4 * self._most))
        if np.any(self.env_steps < self._boundary):
            return []
        rows = [row(self.carry, at) for at in np.ndindex(self.shape)]
        self._boundary = None
        self.carry = self.carry._replace(tally=blank(self.shape))
        return rows


def _programs(engine: Plan, seeds: int | Sequence[int]) -> Programs:
    if isinstance(engine, Engine):
        return jitted(engine, seeds)
    assert isinstance(engine, HostEngine)
    if not isinstance(seeds, int):
        raise ApportionError(f"{engine.simulator.id} runs outside of jit, one seed at a time; give one seed")
    return hosted(engine, seeds)


def _revive(engine: HostEngine, carry: Carry) -> None:
    """Put the engine's simulations where the carry stands, or warn that they cannot be."""
    if not engine.revive(_state(carry)):
        warnings.warn(
            f"the simulations of {engine.simulator.id} cannot be saved in a file; the run goes on with new episodes",
            ApportionWarning,
            stacklevel=4,
        )


def refuse_non_finite(engine: Plan, tally: Tally) -> None:
    """Raise Diverged naming the first iteration that left a non-finite number, if one did."""
    bad = np.asarray(tally.bad)
    if np.any(bad >= 0):
        at = int(np.max(bad))
        raise Diverged(
            f"{engine.method.name} on {engine.simulator.id}: a gradient or parameter became non-finite in "
            f"iteration {at}; lower update.learning_rate or set update.max_grad_norm"
        )


def number(x: Any) -> float | None:
    """A float32 as the shortest decimal that reads back as it; None when it is not finite."""
    return float(str(np.float32(x))) if np.isfinite(x) else None


def row(carry: Any, at: tuple[int, ...]) -> dict[str, Any] | None:
    """The log row of what a carry's tally sums up, of the seed at that place; None when it sums up nothing."""
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
