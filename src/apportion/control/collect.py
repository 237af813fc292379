"""Collections: what the sampler q draws, as arrays. Time-major inside, [N G T] when handed to core.

Two shapes. A *stream* goes on where it stopped and cuts episodes into segments (PPO, A2C). *Episodes* start G
siblings from exactly one state (or each from its own) and run whole, with a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from apportion.control.policy import Parameters, Policy
from apportion.control.simulators import Simulator


class Collection(NamedTuple):
    """Rows of a collection, time first: T steps of M = N·G simulations.

    observation [T M O]; action [T M ...] as sampled, before any clip or squash; logq, reward [T M]; mask, terminated,
    truncated [T M] bool;
    next_observation [T M O] the true next observation, before any reset (empty when no critic reads it).
    """

    observation: jax.Array
    action: jax.Array
    logq: jax.Array
    reward: jax.Array
    mask: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    next_observation: jax.Array


class Stream(NamedTuple):
    """Where the simulations stand between segments: state [M D], clock [M], return and discounted return so far [M].

    The last is kept up by who normalises rewards by it.
    """

    state: jax.Array
    clock: jax.Array
    reward: jax.Array
    discounted: jax.Array


class Finished(NamedTuple):
    """Episodes that ended in a collection: their number, the sum of their returns and of their lengths."""

    episodes: jax.Array
    total: jax.Array
    length: jax.Array


def start_stream(simulator: Simulator, key: jax.Array, size: int) -> Stream:
    """Fresh simulations, [M]."""
    state = jax.vmap(simulator.reset)(jax.random.split(key, size))
    zero = jnp.zeros(size, jnp.float32)
    return Stream(state, jnp.zeros(size, jnp.int32), zero, zero)


def segment(
    simulator: Simulator,
    policy: Policy,
    parameters: Parameters,
    stream: Stream,
    key: jax.Array,
    steps: int,
    temperature: float = 1.0,
) -> tuple[Stream, Collection, Finished]:
    """`steps` more decisions of every simulation in the stream; ended episodes restart at once."""
    size = stream.clock.shape[0]
    noise_key, reset_key = jax.random.split(key)
    # All randomness is drawn in two calls before the loop: inside it, each draw would be several tiny kernels.
    noise = policy.noise(noise_key, (steps, size))
    fresh = jax.vmap(jax.vmap(simulator.reset))(jax.random.split(reset_key, (steps, size)))

    def step(at: Stream, draw: tuple[jax.Array, jax.Array]) -> tuple[Stream, tuple[Collection, Finished]]:
        observation = jax.vmap(simulator.observe)(at.state)
        action, logq = policy.sample(parameters, observation, draw[0], temperature)
        state, reward, terminated = jax.vmap(simulator.step)(at.state, policy.applied(action))
        clock, total = at.clock + 1, at.reward + reward
        truncated = simulator.truncated(clock) & ~terminated
        done = terminated | truncated
        following = jax.vmap(simulator.observe)(state)
        row = Collection(observation, action, logq, reward, jnp.ones_like(done), terminated, truncated, following)
        ended = Finished(done, jnp.where(done, total, 0.0), jnp.where(done, clock, 0))
        state = jnp.where(done[:, None], draw[1], state)
        at = Stream(state, jnp.where(done, 0, clock), jnp.where(done, 0.0, total), at.discounted)
        return at, (row, ended)

    stream, (rows, ended) = jax.lax.scan(step, stream, (noise, fresh))
    return stream, rows, Finished(*(jnp.sum(x) for x in ended))


def episodes(
    simulator: Simulator,
    policy: Policy,
    parameters: Parameters,
    starts: jax.Array,
    key: jax.Array,
    greedy: jax.Array,
    horizon: int,
    temperature: float = 1.0,
) -> Collection:
    """Whole episodes from `starts` [M D], each until it ends or the horizon cuts it.

    greedy: [M] bool, rows that take the mode instead of a sample. The loop stops with the last live row, so that
    short episodes cost what they last; rows already over are masked.
    """
    size = starts.shape[0]
    shape = jax.eval_shape(jax.vmap(simulator.observe), starts)
    zeros = jnp.zeros((horizon, size), jnp.float32)
    action_dtype = jnp.int32 if policy.discrete else jnp.float32
    off = jnp.zeros((horizon, size), bool)
    rows = Collection(
        observation=jnp.zeros((horizon, *shape.shape), jnp.float32),
        action=jnp.zeros((horizon, size, *policy.action_shape), action_dtype),
        logq=zeros,
        reward=zeros,
        mask=off,
        terminated=off,
        truncated=off,
        next_observation=jnp.zeros((horizon, size, shape.shape[1] if policy.critic else 0), jnp.float32),
    )

    def alive_left(carry: tuple[jax.Array, jax.Array, jax.Array, Collection]) -> jax.Array:
        return (carry[0] < horizon) & jnp.any(carry[2])

    def step(
        carry: tuple[jax.Array, jax.Array, jax.Array, Collection],
    ) -> tuple[jax.Array, jax.Array, jax.Array, Collection]:
        t, state, alive, book = carry
        observation = jax.vmap(simulator.observe)(state)
        noise = policy.noise(jax.random.fold_in(key, t), (size,))
        action, logq = policy.sample(parameters, observation, noise, temperature)
        mode = policy.mode(parameters, observation)
        action = jnp.where(greedy.reshape(size, *(1 for _ in policy.action_shape)), mode, action)
        state, reward, terminated = jax.vmap(simulator.step)(state, policy.applied(action))
        terminated = terminated & alive
        truncated = alive & ~terminated & (t + 1 >= horizon)
        following = jax.vmap(simulator.observe)(state) if policy.critic else jnp.zeros((size, 0))
        row = Collection(
            observation, action, logq, jnp.where(alive, reward, 0.0), alive, terminated, truncated, following
        )
        book = jax.tree.map(lambda whole, one: whole.at[t].set(one.astype(whole.dtype)), book, row)
        return t + 1, state, alive & ~terminated, book

    start = (jnp.zeros((), jnp.int32), starts, jnp.ones(size, bool), rows)
    return jax.lax.while_loop(alive_left, step, start)[3]
