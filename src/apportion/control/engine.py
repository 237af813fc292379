"""Training as one jitted program: collect, weigh, step. State in, state out; nothing is kept elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from apportion.control.collect import Collection, Finished, episodes, segment, start_stream
from apportion.control.normalise import Normaliser, merged_where, statistics
from apportion.control.plan import Metrics, Plan, Setup, TrainState, grouped, split_greedy
from apportion.control.policy import Parameters
from apportion.control.simulators import Simulator
from apportion.core.parts import KeepMixed

__all__ = ["Engine", "Metrics", "Plan", "Setup", "TrainState", "grouped", "split_greedy"]


class Drawn(NamedTuple):
    """Whole episodes and the environment steps they took, thrown-away draws included."""

    book: Collection
    steps: jax.Array


@dataclass(frozen=True)
class Engine(Plan):
    """A plan on a jitted simulator, as one program."""

    simulator: Simulator

    def _refusals(self) -> list[tuple[bool, str]]:
        why = "setup.stagger is for simulators outside of jit; leave it off"
        return [*super()._refusals(), (self.setup.stagger, why)]

    def init(self, seed: int | jax.Array) -> TrainState:
        """The state before the first iteration."""
        key, net, start = jax.random.split(jax.random.key(seed), 3)
        stream = start_stream(self.simulator, start, self.setup.envs) if self.streams else None
        return self.begin(net, key, stream)._replace(
            normaliser=jax.tree.map(jnp.asarray, self.unnormalised(jnp.float32))
        )

    def iterate(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One collection and its update. Pure; jit or vmap it."""
        key, collect_key, learn_key = jax.random.split(state.key, 3)
        run = self._stream if self.streams else self._episodes
        flat, opt, stream, taken, normaliser, metrics = run(state, collect_key, learn_key)
        following = TrainState(flat, opt, stream, key, state.env_steps + taken, state.iteration + 1, normaliser)
        return following, metrics

    def _stream(self, state: TrainState, collect_key: jax.Array, learn_key: jax.Array) -> Any:
        assert state.stream is not None
        parameters, temperature = self._acting(state), self.method.sampler.temperature
        stream, book, finished = segment(
            self.simulator, self.policy, parameters, state.stream, collect_key, self.horizon, temperature
        )
        discounted, normaliser = self._normalised(state.normaliser, book, state.stream.discounted)
        flat, opt, metrics = self._learn(state, normaliser, book, finished, learn_key)
        return flat, opt, stream._replace(discounted=discounted), jnp.int32(self.batch), normaliser, metrics

    def _episodes(self, state: TrainState, collect_key: jax.Array, learn_key: jax.Array) -> Any:
        drawn, finished = self._filled(self._acting(state), collect_key)
        _, normaliser = self._normalised(state.normaliser, drawn.book, jnp.zeros(drawn.book.mask.shape[1]))
        flat, opt, metrics = self._learn(state, normaliser, drawn.book, finished, learn_key)
        return flat, opt, None, drawn.steps, normaliser, metrics

    def _acting(self, state: TrainState) -> Parameters:
        """The networks' parameters, with the statistics that they see through."""
        return self.parameters(state) | statistics(state.normaliser)

    def _learn(
        self, state: TrainState, following: Normaliser, book: Collection, finished: Finished, key: jax.Array
    ) -> tuple[jax.Array, Any, Metrics]:
        """The update: rewards by the statistics that count them in, observations as they were acted on."""
        scale = 1.0 if following.reward is None else following.reward.scale
        greedy, own = self.apart(self.seen(book, statistics(state.normaliser), scale))
        return self.learn(state.parameters, state.optimiser, own, finished, key, self.rate(state.env_steps), greedy)

    def _normalised(self, known: Normaliser, book: Collection, discounted: Any) -> tuple[Any, Normaliser]:
        """The discounted return [M] after the collection, and the statistics with its decisions added."""
        valid, (observation, reward) = book.mask.reshape(-1), known
        if observation is not None:
            observation = merged_where(observation, book.observation.reshape(valid.size, -1), valid)
        if reward is not None:

            def after(before: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                now = self.gamma * before + row[0]
                return jnp.where(row[1], 0.0, now), now

            discounted, returns = jax.lax.scan(after, discounted, (book.reward, book.terminated | book.truncated))
            reward = merged_where(reward, returns.reshape(-1), valid)
        return discounted, Normaliser(observation, reward)

    def _draw(self, parameters: Parameters, key: jax.Array) -> Drawn:
        """N groups of G siblings (and the greedy companion, last of each group), whole episodes."""
        sampler, width = self.method.sampler, self.width
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
        keep = self.method.sampler.keep
        drawn = self._draw(parameters, key)
        if not isinstance(keep, KeepMixed) or keep.max_batches == 1:
            return drawn, self._ended(drawn.book)

        def speaks(book: Collection) -> jax.Array:
            rollouts = grouped(self.apart(book)[1], self.shape, None, None, self.simulator.horizon)
            return jnp.repeat(jnp.any(keep(rollouts) > 0, axis=1), self.width)

        def again(at: tuple[jax.Array, jax.Array, Drawn, Finished]) -> tuple[jax.Array, jax.Array, Drawn, Finished]:
            tries, fixed, have, ended = at
            new = self._draw(parameters, jax.random.fold_in(key, tries))
            book = jax.tree.map(
                lambda old, x: jnp.where(fixed.reshape(1, -1, *(1 for _ in x.shape[2:])), old, x), have.book, new.book
            )
            total = jax.tree.map(jnp.add, ended, self._ended(new.book))
            return tries + 1, speaks(book), Drawn(book, have.steps + new.steps), total

        def silent(at: tuple[jax.Array, jax.Array, Drawn, Finished]) -> jax.Array:
            return (at[0] < keep.max_batches) & ~jnp.all(at[1])

        start = (jnp.int32(1), speaks(drawn.book), drawn, self._ended(drawn.book))
        return jax.lax.while_loop(silent, again, start)[2:]

    def _ended(self, book: Collection) -> Finished:
        """Episodes of a draw, greedy companions left out."""
        _, book = self.apart(book)
        count = jnp.int32(self.setup.envs * self.shape[1])
        return Finished(count, jnp.sum(book.reward), jnp.sum(book.mask, dtype=jnp.int32))
