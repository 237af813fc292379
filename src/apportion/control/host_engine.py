"""Training on simulators outside of jit: native threads step them, one jitted call acts for all, one learns.

State in, state out as in `engine`: each iteration restores the simulations from the state before it steps them, so
that what the next iteration depends on is in the state, whatever happened in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control.cache import COMPILER_OPTIONS
from apportion.control.collect import Collection, Finished
from apportion.control.host_collect import Act, Array, HostStream, buffers, episodes, segment
from apportion.control.hosts import NO_LIMIT, Host, World
from apportion.control.normalise import Moments, Normaliser, merged, statistics
from apportion.control.plan import Metrics, Plan, TrainState
from apportion.core.parts import KeepMixed
from apportion.core.rollouts import Rollouts

BLOCK = 64
"""Steps whose noise is drawn in one call."""


class Draw(NamedTuple):
    """An iteration's randomness: the next key, the keys of actions and of the update, reset seeds [M], reseeds [M]."""

    key: jax.Array
    act: jax.Array
    learn: jax.Array
    seeds: jax.Array
    futures: jax.Array


@dataclass(frozen=True)
class HostEngine(Plan):
    """A plan on simulators outside of jit. They are made at the first iteration, and one iteration runs at a time."""

    simulator: World

    def _refusals(self) -> list[tuple[bool, str]]:
        can = self.simulator.capabilities if self.shared else None
        alone = can is not None and not (can.seeded or can.snapshot)
        why = f"a group cannot start from one state: {can.lacks if can else ''}; set sampler.start='independent'"
        endless = "the task has no time limit; set sampler.horizon"
        return [*super()._refusals(), (alone, why), (self.horizon == NO_LIMIT, endless)]

    @property
    def size(self) -> int:
        """All simulations, M."""
        return self.shape[0] * self.width

    @property
    def shared(self) -> bool:
        """Whether the simulations of a group start from one state."""
        return self.method.sampler.start == "reset" and self.width > 1

    @cached_property
    def host(self) -> Host:
        """The simulations."""
        return self.simulator.open(self.size)

    @cached_property
    def book(self) -> Collection:
        """The buffers that collections are written into."""
        return buffers(self.policy, self.horizon, self.size)

    def init(self, seed: int) -> TrainState:
        """The state before the first iteration."""
        start = jax.jit(lambda seed: jax.random.split(jax.random.key(seed), 3))(np.uint32(seed))
        state = jax.jit(lambda net, key: self.begin(net, key, None))(start[1], start[0])
        if self.streams:
            self.host.reset(None, np.asarray(jax.random.bits(start[2], (self.size,), jnp.uint32)).tolist())
            total = np.zeros(self.size)
            if self.setup.stagger and self.simulator.horizon < NO_LIMIT:
                self.host.clock[:] = np.arange(self.size) * self.simulator.horizon // self.size
                total[self.host.clock > 0] = np.nan
            state = state._replace(stream=HostStream(self._rows_now(), total, np.zeros(self.size)))
        return state._replace(normaliser=self.unnormalised(np.float64))

    def _rows_now(self) -> Array:
        return self.host.snapshot() if self.host.row_size else self.host.history()

    def revive(self, state: TrainState) -> bool:
        """Make the simulations stand where the state says, in a process that has not made it.

        Returns False where the state cannot hold them; they have then begun new episodes.
        """
        if not self.streams:
            return True
        if self.host.row_size:
            self.host.restore(None, state.stream.rows)
            return True
        if self.host.history_size and self.host.capabilities.replays:
            self.host.replay(state.stream.rows)
            return True
        self.host.reset(None, np.asarray(self._draw(state.key).seeds).tolist())
        return False

    def iterate(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One collection and its update."""
        draw = self._draw(state.key)
        known = self._known(state)
        act = self._acting(state.parameters, known, draw.act)
        run = self._stream if self.streams else self._episodes
        stream, returns, finished, taken = run(act, state, draw)
        valid = np.asarray(self.book.mask)
        reward = self._seen(state.normaliser.reward, returns, valid)
        scale = np.float32(1.0 if reward is None else reward.scale)
        given = state.parameters, state.optimiser, self.book, finished, draw.learn, state.env_steps
        out = self._learn(*given, known, scale)
        # The update runs in XLA's thread meanwhile. Statistics of a collection serve from the next one on.
        observation = self._seen(state.normaliser.observation, self.book.observation, valid)
        flat, opt, metrics = jax.block_until_ready(out)
        steps = jnp.asarray(state.env_steps + np.int32(taken))
        normaliser = Normaliser(observation, reward)
        following = TrainState(flat, opt, stream, draw.key, steps, state.iteration + 1, normaliser)
        return following, metrics

    def _stream(self, act: Act, state: TrainState, draw: Draw) -> tuple[HostStream, Array, Finished, int]:
        if self.host.row_size:
            self.host.restore(None, state.stream.rows)
        tallies, returns, finished = segment(self.host, act, self.book, state.stream, self.gamma)
        return HostStream(self._rows_now(), *tallies), returns, finished, self.batch

    def _episodes(self, act: Act, state: TrainState, draw: Draw) -> tuple[None, Array, Finished, int]:
        """With dynamic sampling, groups that the filter drops are replaced by the next draw's, as `Engine` does."""
        returns, finished, taken = self._fresh(act, draw)
        keep = self.method.sampler.keep
        for tries in range(1, keep.max_batches if isinstance(keep, KeepMixed) else 1):
            fixed = np.repeat(self._speaks(), self.width)
            if fixed.all():
                break
            old = [np.asarray(x)[:, fixed] for x in (*self.book, returns)]
            again = self._draw(jax.random.fold_in(draw.act, tries))
            act = self._acting(state.parameters, self._known(state), again.act)
            returns, more, steps = self._fresh(act, again)
            for whole, part in zip((*self.book, returns), old, strict=True):
                np.asarray(whole)[:, fixed] = part
            finished, taken = jax.tree.map(np.add, finished, more), taken + steps
        return None, returns, finished, taken

    def _fresh(self, act: Act, draw: Draw) -> tuple[Array, Finished, int]:
        """One draw of all groups: discounted returns [T M], what ended (no companions), steps taken."""
        seeds, ids = np.asarray(draw.seeds), np.arange(self.size).reshape(-1, self.width)
        if self.shared:
            for group in ids:
                self.host.reset_group(group, int(seeds[group[0]]))
            # One start, but futures of their own where the task draws on chance.
            self.host.reseed(None, np.asarray(draw.futures).tolist())
        else:
            self.host.reset(None, seeds.tolist())
        returns = episodes(self.host, act, self.book, self.gamma)
        mask, reward = (self._siblings(x) for x in (self.book.mask, self.book.reward))
        ended = np.int32(mask[0].size), reward.sum(dtype=np.float64), mask.sum()
        finished = Finished(ended[0], np.float32(ended[1]), np.int32(ended[2]))  # type: ignore[arg-type]
        return returns, finished, int(np.asarray(self.book.mask).sum())

    def _siblings(self, x: Any) -> Array:
        """[T N G] of [T M]: without the greedy companions."""
        return np.asarray(x).reshape(-1, self.shape[0], self.width)[..., : self.shape[1]]

    def _speaks(self) -> Array:
        """Which groups the filter keeps, [N] bool."""
        reward, mask, logq = (
            np.moveaxis(self._siblings(x), 0, -1) for x in (self.book.reward, self.book.mask, self.book.logq)
        )
        rollouts = Rollouts(reward, mask, logq, horizon=self.simulator.horizon)
        return np.any(np.asarray(self.method.sampler.keep(rollouts)) > 0, axis=1)

    def _seen(self, moments: Moments | None, rows: Any, valid: Array) -> Moments | None:
        """The moments with the decisions of a collection [T M ...] added."""
        if moments is None:
            return None
        return merged(moments, rows.reshape(-1, *rows.shape[2:]) if valid.all() else rows[valid])

    def _known(self, state: TrainState) -> Any:
        """What observations are seen through, on the device."""
        return jax.tree.map(jnp.asarray, statistics(state.normaliser))

    def _acting(self, flat: jax.Array, known: Any, key: jax.Array) -> Act:
        noise: Any = None

        def act(t: int, observation: Array) -> tuple[Array, Array, Array]:
            nonlocal noise
            if t % BLOCK == 0:
                noise = self._noise(key, t // BLOCK)
            action, logq, applied = self._act(flat, known, noise, t % BLOCK, observation)
            return np.asarray(action), np.asarray(logq), np.asarray(applied)

        return act

    @cached_property
    def _draw(self) -> Callable[[jax.Array], Draw]:
        def draw(key: jax.Array) -> Draw:
            key, act, learn, start, future = jax.random.split(key, 5)
            seeds = (jax.random.bits(k, (self.size,), jnp.uint32) for k in (start, future))
            return Draw(key, act, learn, *seeds)

        return jax.jit(draw)

    @cached_property
    def _noise(self) -> Callable[[jax.Array, int], jax.Array]:
        return jax.jit(lambda key, block: self.policy.noise(jax.random.fold_in(key, block), (BLOCK, self.size)))

    @cached_property
    def _act(self) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        sampler = self.method.sampler
        companion = np.arange(self.size) % self.width == self.shape[1]

        def act(flat: jax.Array, known: Any, noise: jax.Array, t: jax.Array, observation: jax.Array) -> Any:
            parameters = self.learner.unravel(flat) | known
            action, logq = self.policy.sample(parameters, observation, noise[t], sampler.temperature)
            if sampler.greedy:
                mode = self.policy.mode(parameters, observation)
                action = jnp.where(companion.reshape(-1, *(1 for _ in self.policy.action_shape)), mode, action)
            return action, logq, self.policy.applied(action)

        return jax.jit(act)

    @cached_property
    def _learn(self) -> Callable[..., tuple[jax.Array, Any, Metrics]]:
        def learn(
            flat: jax.Array,
            opt: Any,
            book: Collection,
            finished: Finished,
            key: jax.Array,
            steps: jax.Array,
            known: Any,
            scale: jax.Array,
        ) -> tuple[jax.Array, Any, Metrics]:
            greedy, own = self.apart(self.seen(book, known, scale))
            return self.learn(flat, opt, own, finished, key, self.rate(steps), greedy)

        return jax.jit(learn, compiler_options=COMPILER_OPTIONS)

    def compile(self, state: TrainState) -> None:
        """Compile everything that an iteration calls, without changing anything."""
        known, key = self._known(state), self._draw(state.key).act
        self._acting(state.parameters, known, key)(0, np.asarray(self.book.observation[0]))
        none = Finished(np.int32(0), np.float32(0), np.int32(0))  # type: ignore[arg-type]
        given = (state.parameters, state.optimiser, self.book, none, key, state.env_steps, known, np.float32(1))
        jax.block_until_ready(self._learn(*given))
