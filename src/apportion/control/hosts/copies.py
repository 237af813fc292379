"""Copying a Gymnasium environment's state, and finding out by trial whether that works."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import gymnasium
import numpy as np

from apportion.control.hosts import streams
from apportion.control.hosts.base import Capabilities

Env = gymnasium.Env[Any, Any]

_STATE_METHODS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("clone_state", "restore_state", {"include_rng": True}),
    ("get_state", "set_state", {}),
)
"""Names under which environments offer their state: the Arcade Learning Environment's, and the common pair."""
_BEFORE, _AFTER = 5, 20
"""Steps of a trial before the copy is taken, and after it."""


class Keeper(Protocol):
    """A way of saving an environment."""

    def save(self, env: Env) -> Any:
        """Its state, independent of it."""

    def load(self, env: Env, saved: Any) -> Env:
        """An environment in that state: this one, or one to take its place. ``saved`` stays usable."""


class WholeCopies:
    """Deep copies of the environment with all its wrappers."""

    def save(self, env: Env) -> Any:
        """See `Keeper`."""
        return clone(env)

    def load(self, env: Env, saved: Any) -> Env:
        """See `Keeper`."""
        return clone(saved)


class OwnState:
    """The state that the environment itself hands out and takes back."""

    def __init__(self, getter: str, setter: str, options: dict[str, Any]):
        self._getter, self._setter, self._options = getter, setter, options

    def save(self, env: Env) -> Any:
        """See `Keeper`; the generator beside it, as most such methods leave it out."""
        state = getattr(env.unwrapped, self._getter)(**self._options)
        return copy.deepcopy((state, env.unwrapped.np_random))

    def load(self, env: Env, saved: Any) -> Env:
        """See `Keeper`."""
        state, generator = copy.deepcopy(saved)
        getattr(env.unwrapped, self._setter)(state)
        env.unwrapped.np_random = generator
        return env


def clone(env: Env) -> Env:
    """A deep copy, layer by layer from the inside.

    ``copy.deepcopy`` alone would not do: environments with Gymnasium's EzPickle are rebuilt from their constructor's
    arguments, and so lose their state. Spaces and the registration are shared: they do not change.
    """
    layers = list(_layers(env))
    memo: dict[int, Any] = {}
    for layer in layers:
        for constant in ("action_space", "observation_space", "spec", "_cached_spec"):
            if (value := layer.__dict__.get(constant)) is not None:
                memo[id(value)] = value
    for layer in reversed(layers):
        twin = object.__new__(type(layer))
        memo[id(layer)] = twin
        twin.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return memo[id(env)]


def _layers(env: Env) -> Iterator[Env]:
    """The wrappers from the outside, then the environment."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def examine(make: Callable[[], Env]) -> tuple[Capabilities, Keeper | None]:
    """Try on two scratch environments what their states and seeds are good for.

    A trial of a few random steps can refute a promise and not prove it.

    Returns:
        The capabilities, and the keeper that worked.
    """
    env, other = make(), make()
    try:
        seeded = _seeds_repeat(env, other)
        replays = seeded and _streams_repeat(env, other)
        keeper, why = _keeper(env, other)
    finally:
        env.close()
        other.close()
    lacks = [] if seeded else ["the same seed does not give the same episode"]
    if keeper is None:
        lacks.append(f"its state cannot be copied ({why}), and it offers no {_STATE_METHODS[0][0]} or get_state")
    return Capabilities(keeper is not None, seeded, "; ".join(lacks), replays), keeper


def _seeds_repeat(env: Env, other: Env) -> bool:
    """Whether one seed gives one episode, in a used environment and in another one."""
    episodes = []
    for each, seed in ((env, 1), (env, 2), (env, 1), (other, 1)):
        start, _ = each.reset(seed=seed)
        episodes.append([np.asarray(start), *_run(each, _AFTER)])
    return _same(episodes[0], episodes[2]) and _same(episodes[0], episodes[3])


def _streams_repeat(env: Env, other: Env) -> bool:
    """Whether the random stream at a reset, given to another environment, repeats the episode and what follows."""
    for seed in (5, None):  # the episode that a seed began, and a later one
        stream = env.unwrapped.np_random if seed is None else streams.generator(seed)
        if not streams.packs(stream):
            return False
        row = streams.pack(stream)
        first = [np.asarray(env.reset(seed=seed)[0]), *_run(env, _AFTER)]
        other.unwrapped.np_random = streams.unpack(row)
        if not _same(first, [np.asarray(other.reset()[0]), *_run(other, _AFTER)]):
            return False
    return True


def _keeper(env: Env, other: Env) -> tuple[Keeper | None, str]:
    """The first way of saving that replays exactly, and why the last one did not."""
    offered = [m for m in _STATE_METHODS if all(callable(getattr(env.unwrapped, name, None)) for name in m[:2])]
    candidates: list[Keeper] = [*(OwnState(*methods) for methods in offered), WholeCopies()]
    why = ""
    for keeper in candidates:
        # Anything may go wrong inside a third party's copy; whatever it is, this way does not work.
        try:
            if _replays(keeper, env, other):
                return keeper, ""
            why = "a copy does not replay"
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
    return None, why


def _replays(keeper: Keeper, env: Env, other: Env) -> bool:
    """Whether a saved state gives the same future twice, in its own environment and in another one."""
    env.reset(seed=3)
    other.reset(seed=4)
    _run(env, _BEFORE)
    saved = keeper.save(env)
    future = _run(env, _AFTER)
    return all(_same(future, _run(keeper.load(each, saved), _AFTER)) for each in (env, other))


def _run(env: Env, steps: int) -> list[Any]:
    """Everything seen in some steps of fixed random actions, over resets."""
    env.action_space.seed(0)
    seen: list[Any] = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        seen += [np.array(observation), reward, terminated, truncated]
        if terminated or truncated:
            seen.append(np.array(env.reset()[0]))
    return seen


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
