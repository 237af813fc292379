"""A3C as its paper has it: asynchronous actors around shared parameters, on Ray.

Each worker has simulations of its own. It takes a copy of the parameters, collects its own segment, computes the
gradient there (a2c's weights, through the one loss line) and hands it over. It is applied to the shared parameters as
it comes, by RMSProp with shared statistics, and the worker goes on from the result without waiting for another one.
Meanwhile others may have moved the parameters: the gradient's *staleness* is by how many updates.

Who comes first is the clock's to decide, so a run is not bitwise repeatable. It is saved and resumed all the same;
workers then begin new episodes.

Source: Mnih et al. 2016, the algorithm and the shared RMSProp of its section 4 and supplement (its epsilon is
unstated), the rate annealed to 0. A worker steps `setup.envs` simulations, where the paper has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from apportion.control.cache import enable
from apportion.control.engine import Engine, Plan
from apportion.control.evaluate import EPISODES
from apportion.control.host_engine import HostEngine
from apportion.control.learn import Learner
from apportion.control.loop import Standing, Tally, blank, count, refuse_non_finite, row
from apportion.control.plan import Metrics, TrainState
from apportion.control.run import conduct
from apportion.control.train import Overrides, configuration, prepare
from apportion.core.errors import ApportionError, InvalidMethod
from apportion.core.parts import NoRatio
from apportion.core.update import Adam
from apportion.runs.callbacks import Callbacks
from apportion.runs.seed import check_seed

DECAY, EPSILON = 0.99, 1e-5
"""Of RMSProp, theta -= rate · g / sqrt(v + epsilon)."""


class Gradients(Learner):
    """A learner whose step hands the gradient out, as the optimiser's state, instead of taking it."""

    def step(self, flat: jax.Array, state: Any, gradient: jax.Array, rate: jax.Array) -> tuple[jax.Array, Any]:
        """The parameters as they were, and the gradient."""
        return flat, gradient


class _Worker(Plan):
    @cached_property
    def learner(self) -> Learner:
        """See `Plan`."""
        base = super().learner
        return Gradients(base.method, base.policy, base.unravel)


class _Jitted(_Worker, Engine):
    """A worker's engine on a jitted simulator."""


class _Hosted(_Worker, HostEngine):
    """A worker's engine on simulations outside of jit."""


class Worker:
    """One actor: its simulations and its copy of the parameters. Lives in a process of Ray's."""

    def __init__(self, engine: Plan, seed: int) -> None:
        enable()
        kind = _Hosted if isinstance(engine, HostEngine) else _Jitted
        built = kind(engine.method, engine.simulator, engine.setup, engine.total_steps)  # type: ignore[arg-type]
        self._iterate = built.iterate if isinstance(built, HostEngine) else jax.jit(built.iterate)
        start = built.init(seed)
        self._state = start._replace(optimiser=jnp.zeros_like(start.parameters))

    def ready(self) -> None:
        """Compile, by a gradient that is thrown away."""
        jax.block_until_ready(self._iterate(self._state)[1])

    def gradient(self, flat: np.ndarray, env_steps: np.ndarray) -> tuple[np.ndarray, Metrics]:
        """The gradient [P] at the parameters [P] on the next segment of this worker's simulations."""
        given = self._state._replace(parameters=jnp.asarray(flat), env_steps=jnp.asarray(env_steps))
        self._state, metrics = self._iterate(given)
        return np.asarray(self._state.optimiser), jax.tree.map(np.asarray, metrics)


class Shared(NamedTuple):
    """What a checkpoint holds. state: parameters and RMSProp's statistics. staleness: its sum since the last row.

    arrived: updates of each worker so far, int32 [W].
    """

    state: TrainState
    tally: Tally
    staleness: Any
    arrived: Any


def rmsprop(engine: Plan) -> optax.GradientTransformation:
    """The shared RMSProp, without its rate, after the method's own clipping of the norm."""
    assert isinstance(engine.method.update, Adam)
    most = engine.method.update.max_grad_norm
    clip = [] if most is None else [optax.clip_by_global_norm(most)]
    return optax.chain(*clip, optax.scale_by_rms(DECAY, EPSILON, eps_in_sqrt=True))


class Async(Standing):
    """The shared parameters between log rows; for a run's folder what `loop.Loop` is.

    Environment steps and iterations are those of the updates applied so far; segments on their way are not counted.
    ray: the package. restore: what gives the `Shared` to go on from, from a template of shapes; None begins anew.
    """

    def __init__(
        self, ray: Any, engine: Plan, seed: int, restore: Callable[[Any], Shared] | None, workers: int
    ) -> None:
        started = time.perf_counter()
        super().__init__(engine)
        self._ray = ray
        # Before JAX computes anything: it starts processes, which JAX's threads would not survive.
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        first = self._first(seed, workers)
        self.carry = first if restore is None else restore(jax.tree.map(np.asarray, first))
        kind = ray.remote(Worker).options(num_cpus=0, scheduling_strategy="SPREAD")
        # A resumed worker must not see the start states of the first session again.
        seeds = np.random.SeedSequence([seed, int(self.iterations)]).generate_state(workers).tolist()
        self._workers = [kind.remote(engine, one) for one in seeds]
        self._get([each.ready.remote() for each in self._workers])
        self._pending: dict[Any, tuple[int, int]] = {}
        self._boundary: np.ndarray | None = None
        self._apply = jax.jit(self._applied)
        for k in range(workers):
            self._send(k)
        self.compile_seconds = time.perf_counter() - started

    def _first(self, seed: int, workers: int) -> Shared:
        key, net = jax.random.split(jax.random.key(seed))
        state = self.engine.begin(net, jax.random.key_data(key), None)
        state = state._replace(optimiser=rmsprop(self.engine).init(state.parameters))
        return Shared(state, jax.tree.map(jnp.asarray, blank()), np.zeros((), np.float32), np.zeros(workers, np.int32))

    def _applied(self, carry: Shared, gradient: jax.Array, metrics: Metrics) -> Shared:
        """The shared parameters one update on."""
        state = carry.state
        rate = self.engine.rate(state.env_steps)
        direction, optimiser = rmsprop(self.engine).update(gradient, state.optimiser)
        moved = state._replace(
            parameters=state.parameters - rate * direction,
            optimiser=optimiser,
            env_steps=state.env_steps + jnp.int32(self.engine.batch),
            iteration=state.iteration + 1,
        )
        tally = count(carry.tally, metrics._replace(learning_rate=rate), moved.parameters, moved.iteration)
        return carry._replace(state=moved, tally=tally)

    def step(self, seconds: float = 0.2) -> list[dict[str, Any]]:
        """Take what arrives for about that long, or up to the next log row, which is returned.

        Raises ApportionError when a worker dies, and naming the update that left a non-finite number.
        """
        until = time.perf_counter() + seconds
        if self._boundary is None:
            self._boundary = self.boundary()
        while self.env_steps < self._boundary and time.perf_counter() < until:
            arrived, _ = self._ray.wait(list(self._pending), timeout=seconds)
            for one in arrived:
                self._take(one)
        if self.env_steps < self._boundary:
            return []
        told = row(self.carry, ())
        assert told is not None
        told["staleness"] = float(self.carry.staleness) / int(self.carry.tally.iterations)
        told["arrived"] = self.carry.arrived.tolist()
        self._boundary = None
        self.carry = self.carry._replace(tally=blank(), staleness=np.zeros((), np.float32))
        return [told]

    def _send(self, k: int) -> None:
        """The parameters as they are to worker k, for its next segment."""
        state = self.carry.state
        sent = self._workers[k].gradient.remote(np.asarray(state.parameters), np.asarray(state.env_steps))
        self._pending[sent] = k, int(self.iterations)

    def _take(self, arrived: Any) -> None:
        """Apply a worker's gradient to whatever the parameters are by now, and send the worker on."""
        k, since = self._pending.pop(arrived)
        gradient, metrics = self._get(arrived)
        stale = np.float32(self.iterations - since)
        moved = self._apply(self.carry, gradient, metrics)
        refuse_non_finite(self.engine, moved.tally)
        each = np.asarray(self.carry.arrived) + (np.arange(len(self._workers)) == k).astype(np.int32)
        self.carry = moved._replace(staleness=self.carry.staleness + stale, arrived=each)
        self._send(k)

    def _get(self, refs: Any) -> Any:
        try:
            return self._ray.get(refs)
        except self._ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]
            raise ApportionError(
                f"a worker of a3c died ({why}); go on from the last checkpoint with --resume"
            ) from None

    def close(self) -> None:
        """End the workers, and Ray if it was started here."""
        for each in self._workers:
            self._ray.kill(each)
        if self._own:
            self._ray.shutdown()


def _check(engine: Plan, workers: Any) -> None:
    """Raise what does not fit."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ApportionError(f"workers is {workers!r}; it must be a whole number of 1 or more")
    sampler, setup = engine.method.sampler, engine.setup
    for bad, why in (
        (not engine.streams, "workers go on where they stopped; set sampler.start='stream'"),
        (
            (sampler.epochs, sampler.minibatches) != (1, 1),
            "a segment gives one gradient; set epochs and minibatches to 1",
        ),
        (not isinstance(engine.method.ratio, NoRatio), "the paper has no ratio; set ratio=NoRatio()"),
        (not isinstance(engine.method.update, Adam), "the rate and the clipping are Adam's; set update=Adam()"),
        (
            setup.normalise_observation or setup.normalise_reward,
            "workers share no statistics; set setup.normalise_observation=False and setup.normalise_reward=False",
        ),
    ):
        if bad:
            raise InvalidMethod(f"a3c on {engine.simulator.id}: {why}")


def train_a3c(
    task: str,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    workers: int = 2,
    overrides: Overrides = (),
    resume: bool = False,
    quiet: bool = False,
    callbacks: Iterable[Any] = (),
    episodes: int = EPISODES,
    eval_every: int | None = None,
) -> dict[str, Any]:
    """Train by A3C in a folder and return what its summary.json holds; everything but `workers` as in `train_run`.

    The method is the catalogue's a2c with its presets, its rate annealed linearly to 0. workers: how many there are,
    in Ray's cluster if one is connected (or RAY_ADDRESS names one), else on this machine. Rows of the metrics add
    "staleness" (updates, a mean) and "arrived" (updates of each worker so far).

    Raises ApportionError as `train_run`, without Ray, for settings that asynchrony cannot run, and when a worker dies.
    """
    began = time.perf_counter()
    told = Callbacks(callbacks)
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ApportionError(f"a3c runs on Ray ({error}); pip install 'apportion[ray]'") from None
    enable()
    pairs = [("update.anneal", "linear"), *(overrides.items() if hasattr(overrides, "items") else overrides)]
    engine = prepare("a2c", task, steps, pairs)
    engine = dataclasses.replace(engine, method=dataclasses.replace(engine.method, name="a3c"))
    _check(engine, workers)
    config = configuration(engine, check_seed(seed), pairs, eval_every, episodes) | {"workers": workers}
    folder = Path("runs", f"a3c-{task}-seed{seed}") if out is None else Path(out)
    with contextlib.ExitStack() as stack:

        def loop(engine: Plan, seed: int, restore: Any) -> Async:
            return stack.enter_context(contextlib.closing(Async(ray, engine, seed, restore, workers)))

        return conduct(folder, engine, config, f"a3c {task}", began, resume, quiet, told, loop, episodes, eval_every)
