"""Collections from simulators on the host: `collect` outside of jit, written into buffers made once.

A simulation that breaks ends its episode: the broken transition is masked, and the one before it is truncated there,
with the value of the last observation that was whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.control.collect import Collection, Finished
from apportion.control.hosts import Host, Step
from apportion.control.policy import Policy

Array = NDArray[Any]
Act = Callable[[int, Array], tuple[Array, Array, Array]]
"""``(t, observation [M O] float32) -> action [M ...] as sampled, logq [M], the action as the task is given it``."""


class HostStream(NamedTuple):
    """Where the simulations stand between segments: rows [M D], return so far [M], discounted return [M].

    All float64; the return of an episode that is not reported is nan. Rows are snapshots; of simulators whose snapshots
    are objects they are histories (see `Host.history`), and the simulations go on where they stand.
    """

    rows: Array
    total: Array
    discounted: Array


def buffers(policy: Policy, steps: int, size: int) -> Collection:
    """A collection of `steps` decisions of `size` simulations, in NumPy, to be written again and again."""
    observation = np.zeros((steps, size, policy.observation_size), np.float32)
    action_type = np.int32 if policy.discrete else np.float32
    return Collection(
        observation=observation,  # type: ignore[arg-type]
        action=np.zeros((steps, size, *policy.action_shape), action_type),  # type: ignore[arg-type]
        logq=np.zeros((steps, size), np.float32),  # type: ignore[arg-type]
        reward=np.zeros((steps, size), np.float32),  # type: ignore[arg-type]
        mask=np.zeros((steps, size), bool),  # type: ignore[arg-type]
        terminated=np.zeros((steps, size), bool),  # type: ignore[arg-type]
        truncated=np.zeros((steps, size), bool),  # type: ignore[arg-type]
        next_observation=np.zeros_like(observation if policy.critic else observation[..., :0]),  # type: ignore[arg-type]
    )


def bounded(host: Host, action: Array) -> Array:
    """The action as the simulator takes it: clipped to its bounds, dtype kept."""
    if host.action_count:
        return action
    return np.clip(action, np.asarray(host.action_low, action.dtype), np.asarray(host.action_high, action.dtype))


def segment(
    host: Host, act: Act, book: Any, stream: HostStream, gamma: float
) -> tuple[tuple[Array, Array], Array, Finished]:
    """As many decisions of every simulation as `book` holds; ended episodes restart at once.

    Returns (total [M], discounted [M]) at the end, the discounted return after each step [T M], and the episodes that
    ended by themselves or by their time limit.
    """
    steps, (total, discounted) = len(book.reward), (stream.total.copy(), stream.discounted.copy())
    returns, ended = np.zeros((steps, host.size)), [0, 0.0, 0]
    seen = host.observe()
    for t in range(steps):
        book.observation[t] = seen
        book.action[t], book.logq[t], action = act(t, book.observation[t])
        step = host.step(bounded(host, action))
        truncated = host.truncated() & ~step.terminated & ~step.broken
        _write(book, t, step, truncated, ~step.broken)
        total += step.reward
        discounted = gamma * discounted + step.reward
        returns[t] = discounted
        seen = host.observe()
        over = step.terminated | truncated
        done = over | step.broken
        if book.next_observation.shape[-1] and (t == steps - 1 or done.any()):
            book.next_observation[t] = seen
        if done.any():
            told = over & ~np.isnan(total)
            ended = [ended[0] + told.sum(), ended[1] + total[told].sum(), ended[2] + host.clock[told].sum()]
            total[done], discounted[done] = 0, 0
            host.reset(done)
            seen = host.observe()
    return (total, discounted), returns, Finished(np.int32(ended[0]), np.float32(ended[1]), np.int32(ended[2]))  # type: ignore[arg-type]


def episodes(host: Host, act: Act, book: Any, gamma: float = 1.0) -> Array:
    """Whole episodes from where the simulations stand, each until it ends or the book is full; only live ones step.

    Returns the discounted return after each step, [T M].
    """
    steps, live = len(book.reward), np.ones(host.size, bool)
    discounted, returns = np.zeros(host.size), np.zeros((steps, host.size))
    for part in (book.mask, book.terminated, book.truncated, book.reward):
        part[:] = 0
    seen = host.observe()
    for t in range(steps):
        book.observation[t] = seen
        book.action[t], book.logq[t], action = act(t, book.observation[t])
        step = host.step(bounded(host, action), live)
        going = live & ~step.terminated & ~step.broken
        truncated = going & (host.truncated() | (t + 1 == steps))
        _write(book, t, step, truncated, live & ~step.broken)
        discounted = gamma * discounted + step.reward
        returns[t] = discounted
        seen = host.observe()
        if book.next_observation.shape[-1]:
            book.next_observation[t] = seen
        live = going & ~truncated
        if not live.any():
            break
    return returns


def _write(book: Any, t: int, step: Step, truncated: Array, valid: Array) -> None:
    """One step's outcome; a broken simulation's earlier decision becomes its last."""
    book.reward[t], book.mask[t] = step.reward, valid
    book.terminated[t], book.truncated[t] = step.terminated, truncated
    if t and step.broken.any():
        last = step.broken & book.mask[t - 1] & ~book.terminated[t - 1] & ~book.truncated[t - 1]
        book.truncated[t - 1, last] = True
        if book.next_observation.shape[-1]:
            book.next_observation[t - 1, last] = book.observation[t, last]
