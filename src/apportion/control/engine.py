"""Training as one jitted program: collect, weigh, step. State in, state out; nothing is kept elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from apportion.control.collect import Collection, Finished, Stream, episodes, segment, start_stream
from apportion.control.learn import Learner, Rows, Signals, annealed, optimiser
from apportion.control.natural import natural_update
from apportion.control.policy import ACTIVATIONS, Parameters, Policy, policy_for
from apportion.control.simulators import Simulator
from apportion.core.errors import ApportionError, InvalidMethod, UnknownName
from apportion.core.method import Method
from apportion.core.parts import KeepMixed, NoKL, PairLogistic
from apportion.core.rollouts import Rollouts
from apportion.core.update import NaturalGradient
from apportion.core.weigh import advantages


@dataclass(frozen=True)
class Setup:
    """What a run needs beside its method.

    envs: simulations in a stream, or groups N of a collection of episodes. hidden, activation, log_std: the networks.
    """

    envs: int = 8
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    log_std: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.envs, int) and self.envs >= 1):
            raise ApportionError(f"setup.envs is {self.envs!r}; it must be a whole number of 1 or more")
        if not all(isinstance(h, int) and h >= 1 for h in self.hidden):
            raise ApportionError(f"setup.hidden is {self.hidden!r}; it must be a tuple of widths such as (64, 64)")
        if self.activation not in ACTIVATIONS:
            raise UnknownName("activation", self.activation, ACTIVATIONS)


class TrainState(NamedTuple):
    """Everything that the next iteration depends on; saving it is a checkpoint.

    parameters: flat [P]. stream: None for episodes. env_steps: float32 would stop counting at 2^24, hence int32.
    """

    parameters: jax.Array
    optimiser: Any
    stream: Stream | None
    key: jax.Array
    env_steps: jax.Array
    iteration: jax.Array


class Metrics(NamedTuple):
    """What one iteration reports. finished: episodes that ended in it."""

    finished: Finished
    signals: Signals
    explained_variance: jax.Array
    kept: jax.Array
    learning_rate: jax.Array


class Drawn(NamedTuple):
    """Whole episodes and the environment steps they took, thrown-away draws included."""

    book: Collection
    steps: jax.Array


@dataclass(frozen=True)
class Engine:
    """A method on a simulator. Raises InvalidMethod for what control cannot run."""

    method: Method
    simulator: Simulator
    setup: Setup
    total_steps: int

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ApportionError(f"steps is {self.total_steps}; it must be 1 or more environment steps")
        for bad, why in _refusals(self):
            if bad:
                raise InvalidMethod(f"{self.method.name} on {self.simulator.id}: {why}")
        if not self.streams:
            self.method.check_horizon(self.horizon)

    @property
    def streams(self) -> bool:
        """Whether collections are segments of a stream, not whole episodes."""
        return self.method.sampler.start == "stream"

    @property
    def horizon(self) -> int:
        """Decisions per segment, or the longest an episode may last."""
        limit = self.method.sampler.horizon
        if self.streams:
            return limit or self.simulator.horizon
        return min(limit or self.simulator.horizon, self.simulator.horizon)

    @property
    def batch(self) -> int:
        """Decisions of one segment over all simulations."""
        return self.setup.envs * self.horizon

    @cached_property
    def policy(self) -> Policy:
        """The networks' description."""
        return policy_for(
            self.simulator,
            critic=self.method.sampler.values == "critic",
            hidden=self.setup.hidden,
            activation=self.setup.activation,
            log_std=self.setup.log_std,
        )

    @cached_property
    def learner(self) -> Learner:
        """The update, with the way back from the flat vector to the networks."""
        template = jax.eval_shape(self.policy.init, jax.random.key(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), template)
        return Learner(self.method, self.policy, ravel_pytree(zeros)[1])

    def parameters(self, state: TrainState) -> Parameters:
        """The networks' parameters as a pytree."""
        return self.learner.unravel(state.parameters)

    def init(self, seed: int | jax.Array) -> TrainState:
        """The state before the first iteration."""
        key, net, start = jax.random.split(jax.random.key(seed), 3)
        flat = ravel_pytree(self.policy.init(net))[0]
        stream = start_stream(self.simulator, start, self.setup.envs) if self.streams else None
        zero = jnp.zeros((), jnp.int32)
        return TrainState(flat, optimiser(self.method.update).init(flat), stream, key, zero, zero)

    def iterate(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One collection and its update. Pure; jit or vmap it."""
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        run = self._stream if self.streams else self._episodes
        flat, opt, stream, taken, metrics = run(state, collect_key, learn_key)
        following = TrainState(flat, opt, stream, key, state.env_steps + taken, state.iteration + 1)
        return following, metrics

    def _rate(self, state: TrainState) -> jax.Array:
        if isinstance(self.method.update, NaturalGradient):
            return jnp.full((), jnp.nan)
        return annealed(self.method.update, state.env_steps / self.total_steps)

    def _stream(self, state: TrainState, collect_key: jax.Array, learn_key: jax.Array) -> Any:
        assert state.stream is not None
        parameters, sampler = self.parameters(state), self.method.sampler
        stream, book, finished = segment(
            self.simulator, self.policy, parameters, state.stream, collect_key, self.horizon, sampler.temperature
        )
        value, next_value = self._values(parameters, book)
        rollouts = grouped(book, (self.setup.envs, 1), value, next_value, self.simulator.horizon)
        rows, kept = self._rows(rollouts, book)
        rate = self._rate(state)
        before = state.parameters, state.optimiser, rows, learn_key
        if isinstance(self.method.update, NaturalGradient):
            flat, opt, signals = natural_update(self.learner, *before)
        else:
            flat, opt, signals = self.learner.even(*before, rate)
        metrics = Metrics(finished, signals, explained_variance(rows, rollouts), kept, rate)
        return flat, opt, stream, jnp.int32(self.batch), metrics

    def _episodes(self, state: TrainState, collect_key: jax.Array, learn_key: jax.Array) -> Any:
        groups, siblings = self.setup.envs, self.method.sampler.group
        parameters = self.parameters(state)
        everything, finished = self._filled(parameters, collect_key)
        width = siblings + self.method.sampler.greedy
        greedy_return, book = split_greedy(everything.book, groups, width, self.method.sampler.greedy)
        value, next_value = self._values(parameters, book)
        rollouts = grouped(book, (groups, siblings), value, next_value, self.simulator.horizon, greedy_return)
        rows, kept = self._rows(rollouts, book)
        rate = self._rate(state)
        valid = (rows.share > 0).reshape(rollouts.mask.shape)
        flat, opt, signals = self.learner.ragged(state.parameters, state.optimiser, rows, valid, learn_key, rate)
        metrics = Metrics(finished, signals, explained_variance(rows, rollouts), kept, rate)
        return flat, opt, None, everything.steps, metrics

    def _draw(self, parameters: Parameters, key: jax.Array) -> Drawn:
        """N groups of G siblings (and the greedy companion, last of each group), whole episodes."""
        sampler = self.method.sampler
        width = sampler.group + sampler.greedy
        size = self.setup.envs * width
        start_key, act_key = jax.random.split(key)
        shared = sampler.start == "reset"
        starts = jax.vmap(self.simulator.reset)(jax.random.split(start_key, self.setup.envs if shared else size))
        starts = jnp.repeat(starts, width if shared else 1, axis=0)
        greedy = jnp.arange(size) % width == sampler.group
        temperature = sampler.temperature
        book = episodes(self.simulator, self.policy, parameters, starts, act_key, greedy, self.horizon, temperature)
        return Drawn(book, jnp.sum(book.mask, dtype=jnp.int32))

    def _filled(self, parameters: Parameters, key: jax.Array) -> tuple[Drawn, Finished]:
        """A collection and the episodes that ended in it; with dynamic sampling, drawn again until every group speaks.

        A group that the filter drops is replaced by the group in its place of the next draw, up to `max_batches`
        draws. All steps are counted, and the returns reported are those of every draw, not of the groups kept.
        """
        sampler = self.method.sampler
        drawn = self._draw(parameters, key)
        if not isinstance(sampler.keep, KeepMixed) or sampler.keep.max_batches == 1:
            return drawn, self._ended(drawn.book)
        keep, most, width = sampler.keep, sampler.keep.max_batches, sampler.group + sampler.greedy

        def speaks(book: Collection) -> jax.Array:
            _, siblings = split_greedy(book, self.setup.envs, width, sampler.greedy)
            rollouts = grouped(siblings, (self.setup.envs, sampler.group), None, None, self.simulator.horizon)
            return jnp.repeat(jnp.any(keep(rollouts) > 0, axis=1), width)

        def again(at: tuple[jax.Array, Drawn, Finished]) -> tuple[jax.Array, Drawn, Finished]:
            tries, have, ended = at
            new = self._draw(parameters, jax.random.fold_in(key, tries))
            fixed = speaks(have.book)
            book = jax.tree.map(
                lambda old, x: jnp.where(fixed.reshape(1, -1, *(1 for _ in x.shape[2:])), old, x), have.book, new.book
            )
            total = jax.tree.map(jnp.add, ended, self._ended(new.book))
            return tries + 1, Drawn(book, have.steps + new.steps), total

        start = (jnp.int32(1), drawn, self._ended(drawn.book))
        going = lambda at: (at[0] < most) & ~jnp.all(speaks(at[1].book))  # noqa: E731
        return jax.lax.while_loop(going, again, start)[1:]

    def _ended(self, book: Collection) -> Finished:
        """Episodes of a draw, greedy companions left out."""
        sampler = self.method.sampler
        _, book = split_greedy(book, self.setup.envs, sampler.group + sampler.greedy, sampler.greedy)
        count = jnp.int32(self.setup.envs * sampler.group)
        return Finished(count, jnp.sum(book.reward), jnp.sum(book.mask, dtype=jnp.int32))

    def _values(self, parameters: Parameters, book: Collection) -> tuple[jax.Array | None, jax.Array | None]:
        """Critic's values [T M] of each state and of the true next one."""
        if not self.policy.critic:
            return None, None
        value = self.policy.value(parameters, book.observation)
        last = self.policy.value(parameters, book.next_observation[-1:])
        following = jnp.concatenate([value[1:], last])

        def at_limit() -> jax.Array:
            return jnp.where(book.truncated, self.policy.value(parameters, book.next_observation), following)

        # The next row's value is the next state's, except where a time limit cut in between (a real end has none).
        return value, jax.lax.cond(jnp.any(book.truncated), at_limit, lambda: following)

    def _rows(self, rollouts: Rollouts, book: Collection) -> tuple[Rows, jax.Array]:
        """Flat rows for the learner, in [N G T] order, and the fraction of trajectories the filter kept."""
        ledger = advantages(self.method, rollouts)
        observed = jnp.moveaxis(book.observation, 0, 1)
        acted = jnp.moveaxis(book.action, 0, 1)
        flat = ledger.map(lambda x: x.reshape(-1))
        kept = jnp.where(flat.share > 0, 1.0, 0.0)
        rows = Rows(
            observation=observed.reshape(-1, observed.shape[-1]),
            action=acted.reshape(-1, *acted.shape[2:]),
            logq=flat.logq,
            advantage=flat.advantage,
            share=flat.share,
            weight=kept / jnp.maximum(jnp.sum(kept), 1),
            target=flat.credit,
            old_value=flat.credit if rollouts.value is None else rollouts.value.reshape(-1),
        )
        return rows, jnp.mean(self.method.sampler.keep(rollouts) > 0)


def _refusals(engine: Engine) -> list[tuple[bool, str]]:
    method, sampler = engine.method, engine.method.sampler
    reference = not isinstance(method.kl, NoKL) or isinstance(method.trust, PairLogistic)
    foreign = sampler.proposer != "policy" or sampler.feedback != "reward"
    whole = sampler.greedy or method.ratio.per_sequence
    return [
        (
            foreign,
            "control learns from the task's reward on the policy's own actions; choose another method, or train this "
            "one on the toy language (apportion.toy.train)",
        ),
        (reference, "control has no reference policy; set kl=NoKL()"),
        (sampler.values == "rollouts", "values from fresh rollouts are not offered here; set sampler.values='critic'"),
        (sampler.start == "visited", "groups from visited states are not offered here; set sampler.start='reset'"),
        (
            isinstance(method.update, NaturalGradient)
            and not (engine.streams and method.value_loss and method.entropy == 0),
            "the natural gradient runs on a stream with a critic and no entropy bonus; set sampler.start='stream' and "
            "entropy=0, or update=Adam()",
        ),
        (
            not isinstance(method.update, NaturalGradient)
            and method.value_loss is not None
            and method.value_loss.learning_rate is not None,
            "one Adam steps policy and critic together; set value_loss.learning_rate=None",
        ),
        (
            engine.streams and whole,
            "a stream has no whole trajectories for a greedy companion or a sequence ratio; set sampler.start='reset'",
        ),
        (
            engine.streams and engine.batch % sampler.minibatches > 0,
            f"{engine.batch} decisions (setup.envs {engine.setup.envs} x sampler.horizon {engine.horizon}) do not "
            f"divide into sampler.minibatches={sampler.minibatches}",
        ),
    ]


def grouped(
    book: Collection,
    groups: tuple[int, int],
    value: jax.Array | None,
    next_value: jax.Array | None,
    horizon: int,
    greedy_return: jax.Array | None = None,
) -> Rollouts:
    """The collection as core's Rollouts: [T M] becomes [N G T]."""

    def turn(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(*groups, x.shape[0])

    return Rollouts(
        reward=turn(book.reward),
        mask=turn(book.mask),
        logq=turn(book.logq),
        terminated=turn(book.terminated),
        truncated=turn(book.truncated),
        value=None if value is None else turn(value),
        next_value=None if next_value is None else turn(next_value),
        greedy_return=greedy_return,
        horizon=horizon,
    )


def split_greedy(book: Collection, groups: int, width: int, greedy: bool) -> tuple[jax.Array | None, Collection]:
    """Take the greedy companion (last of each group) out of the collection; its return [N] is all that is used."""
    if not greedy:
        return None, book
    apart = Collection(*(x.reshape(x.shape[0], groups, width, *x.shape[2:]) for x in book))
    rest = Collection(*(x[:, :, :-1].reshape(x.shape[0], groups * (width - 1), *x.shape[3:]) for x in apart))
    return jnp.sum(apart.reward[:, :, -1], axis=0), rest


def explained_variance(rows: Rows, rollouts: Rollouts) -> jax.Array:
    """1 - Var(target - value) / Var(target) over the decisions; nan without a critic."""
    if rollouts.value is None:
        return jnp.full((), jnp.nan)
    mean = jnp.sum(rows.weight * rows.target)
    error = rows.target - rows.old_value
    spread = jnp.sum(rows.weight * (rows.target - mean) ** 2)
    return 1 - jnp.sum(rows.weight * (error - jnp.sum(rows.weight * error)) ** 2) / jnp.maximum(spread, 1e-12)
