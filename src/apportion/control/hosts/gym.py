"""Any registered Gymnasium environment as a host. Gymnasium's autoreset is off, so no fake reset step exists."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import ArrayLike

from apportion.control.hosts import streams
from apportion.control.hosts.base import (
    NO_LIMIT,
    Array,
    Capabilities,
    Host,
    Ids,
    Step,
    actions_for,
    indices,
    seeds_for,
)
from apportion.control.hosts.copies import Env, Keeper, examine
from apportion.core.errors import ApportionError, InvalidData, UnknownName

HISTORY = 1_000_000
"""Numbers, over all simulations, beyond which no history of episodes is kept: 8 MB in a checkpoint."""


class GymHost(Host):
    """M environments of one id, stepped one after another in this process.

    Box observations are flattened to float64 if they are that, else to float32. Discrete actions count from 0 whatever
    the space's start. Snapshot rows are opaque objects. `terms` stays empty.

    An environment whose observation or reward is not finite is broken; `observe` keeps its last finite observation.

    Raises:
        UnknownName: When no environment has this id.
        ApportionError: When the environment cannot be made, or has spaces that no policy here fits.
    """

    def __init__(self, id: str, size: int, film: bool = False):
        self.id, self.size = id, size
        self._make = functools.partial(make, id, film)
        self._vector = SyncVectorEnv([self._make] * size, autoreset_mode=AutoresetMode.DISABLED)
        self._envs: list[Env] = list(self._vector.envs)
        seen, action = self._vector.single_observation_space, self._vector.single_action_space
        if not isinstance(seen, spaces.Box):
            raise ApportionError(f"{id} has {type(seen).__name__} observations; only Box observations are supported")
        for what, space in (("observations", seen), ("actions", action)):
            if 0 in (space.shape or ()):
                raise ApportionError(f"{id} has {what} of shape {space.shape}, which hold nothing to see or to choose")
        self._action_space = action
        self._set_actions(action)
        self.observation_size = int(np.prod(seen.shape))
        dtype = np.float64 if seen.dtype == np.float64 else np.float32
        self._observation = np.zeros((size, self.observation_size), dtype)
        self.horizon = gymnasium.spec(id).max_episode_steps or NO_LIMIT
        self.clock, self._cut = np.zeros(size, np.int64), np.zeros(size, bool)
        self._begun = np.zeros((size, streams.WIDTH))
        self._past: list[list[Any]] = [[] for _ in range(size)]
        row = streams.WIDTH + 2 + self.horizon * max(self.action_size, 1)
        self.history_size = row if size * row <= HISTORY else 0
        self.terms, self.row_size = {}, 0
        self.fps = float(self._envs[0].metadata.get("render_fps", 30))

    def _set_actions(self, action: gymnasium.Space[Any]) -> None:
        self.action_count = self.action_size = 0
        self.action_low = self.action_high = ()
        if isinstance(action, spaces.Discrete):
            self.action_count = int(action.n)
        elif isinstance(action, spaces.Box) and np.issubdtype(action.dtype, np.floating):
            self.action_size = int(np.prod(action.shape))
            self.action_low = tuple(action.low.ravel().astype(float).tolist())
            self.action_high = tuple(action.high.ravel().astype(float).tolist())
        else:
            raise ApportionError(f"{self.id} has {action} actions; only Discrete and floating Box are supported")

    @functools.cached_property
    def _examined(self) -> tuple[Capabilities, Keeper | None]:
        return examine(self._make)

    @property
    def capabilities(self) -> Capabilities:
        """See `Host`; found by trial on scratch environments, once."""
        return self._examined[0]

    @property
    def _keeper(self) -> Keeper:
        can, keeper = self._examined
        if keeper is None:
            raise ApportionError(f"{self.id} has no snapshots: {can.lacks}")
        return keeper

    def reset(self, ids: Ids = None, seeds: int | Sequence[int] | None = None) -> None:
        """See `Host`; the environments' own ``reset(seed=)``."""
        chosen = indices(ids, self.size)
        each = [None] * len(chosen) if seeds is None else seeds_for(chosen, seeds)
        for i, seed in zip(chosen, each, strict=True):
            stream = self._envs[i].unwrapped.np_random if seed is None else streams.generator(seed)
            self._begun[i], self._past[i] = streams.pack(stream) if streams.packs(stream) else 0, []
            observation, _ = self._envs[i].reset(seed=seed)
            self._observation[i] = np.ravel(observation)
        self.clock[chosen], self._cut[chosen] = 0, False

    def history(self) -> Array:
        """See `Host`: the random stream at the reset, the clock, and the actions since then."""
        rows = super().history()
        if self.history_size:
            at = streams.WIDTH + 2
            rows[:, :at] = np.column_stack([self._begun, self.clock, [len(p) for p in self._past]])
            for row, past in zip(rows, self._past, strict=True):
                row[at : at + np.size(past)] = np.ravel(past)
        return rows

    def replay(self, rows: Array) -> None:
        """See `Host`. Needs the capability `replays`."""
        width, at = max(self.action_size, 1), streams.WIDTH + 2
        for i, row in enumerate(rows):
            self._envs[i].unwrapped.np_random = streams.unpack(row[: streams.WIDTH])
            self.reset([i])
            for action in row[at : at + int(row[at - 1]) * width].reshape(-1, width):
                given = np.zeros((self.size, self.action_size)) if self.action_size else np.zeros(self.size, np.int64)
                given[i] = action if self.action_size else int(action[0])
                self.step(given, [i])
            self.clock[i] = int(row[at - 2])

    def reseed(self, ids: Ids, seeds: int | Sequence[int]) -> None:
        """See `Host`; replaces ``np_random``, so an environment with another source of chance is not reached."""
        chosen = indices(ids, self.size)
        for i, seed in zip(chosen, seeds_for(chosen, seeds), strict=True):
            self._envs[i].unwrapped.np_random = streams.generator(seed)

    def observe(self) -> Array:
        """See `Host`."""
        return self._observation.copy()

    def step(self, actions: ArrayLike, live: Ids = None) -> Step:
        """See `Host`."""
        chosen = indices(live, self.size)
        given = actions_for(actions, self, chosen)
        out = Step(np.zeros(self.size), np.zeros(self.size, bool), np.zeros(self.size, bool))
        for i in chosen:
            if self.history_size:
                self._past[i].append(given[i].copy())
            observation, reward, terminated, cut, _ = self._envs[i].step(self._action(given[i]))
            seen = np.ravel(observation)
            if np.isfinite(seen).all() and np.isfinite(reward):
                self._observation[i], out.reward[i] = seen, reward
                out.terminated[i], self._cut[i] = terminated, cut
            else:
                out.broken[i] = True
        self.clock[chosen] += 1
        return out

    def _action(self, action: Any) -> Any:
        """In the environment's own terms."""
        space = self._action_space
        if isinstance(space, spaces.Discrete):
            return space.dtype.type(action + space.start)
        return np.asarray(action, space.dtype).reshape(space.shape)

    def truncated(self) -> Array:
        """See `Host`; also where the environment cut its episode itself."""
        return super().truncated() | self._cut

    def snapshot(self, ids: Ids = None) -> Array:
        """See `Host`; objects ``[n]``."""
        chosen, keeper = indices(ids, self.size), self._keeper
        rows = np.empty(len(chosen), object)
        for k, i in enumerate(chosen):
            rows[k] = (self.id, keeper.save(self._envs[i]), self._observation[i].copy(), self.clock[i], self._cut[i])
        return rows

    def restore(self, ids: Ids, rows: Array) -> None:
        """See `Host`."""
        chosen, keeper, rows = indices(ids, self.size), self._keeper, np.atleast_1d(rows)
        if rows.dtype != object or any(row[0] != self.id for row in rows):
            raise InvalidData(f"these are not snapshot rows of {self.id}")
        if len(rows) not in (1, len(chosen)):
            raise InvalidData(f"{len(rows)} snapshot rows for {len(chosen)} simulations")
        for i, row in zip(chosen, np.broadcast_to(rows, chosen.shape), strict=True):
            _, saved, self._observation[i], self.clock[i], self._cut[i] = row
            self._envs[i] = keeper.load(self._envs[i], saved)

    def frame(self, index: int, camera: str | None = None) -> Array:
        """See `Host`; Gymnasium's own rendering."""
        if camera is not None:
            raise ApportionError(f"{self.id} has no cameras to choose from; leave camera out")
        return drawn(self.id, self._envs[index])

    def close(self) -> None:
        """Close all environments."""
        for env in self._envs:
            env.close()


def drawn(id: str, env: Env) -> Array:
    """The environment's own picture of itself. Raises ApportionError when it cannot draw."""
    try:
        picture = env.render()
    except (gymnasium.error.Error, ImportError) as error:
        raise ApportionError(f"Gymnasium cannot draw {id} ({_first(error)}); pip install 'apportion[video]'") from None
    if not isinstance(picture, np.ndarray) or picture.ndim != 3:
        raise ApportionError(f"{id} draws no picture: its render() gives {type(picture).__name__}")
    return picture


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def make(id: str, film: bool = False) -> Env:
    """One environment without the time limit, which is the engine's; one that draws itself when `film`.

    Raises:
        UnknownName: With the nearest registered id.
        ApportionError: When it is registered but cannot be made; the message says why.
    """
    module, _, name = id.rpartition(":")
    if not module and name not in gymnasium.registry:  # Gymnasium would take the nearest version for one without
        raise UnknownName("task", id, _newest(gymnasium.registry))
    try:
        mode = {"render_mode": "rgb_array"} if film else {}
        return gymnasium.make(id, max_episode_steps=-1, disable_env_checker=True, **mode)
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound, gymnasium.error.VersionNotFound):
        raise UnknownName("task", id, _newest(gymnasium.registry)) from None
    except (gymnasium.error.Error, ImportError, OSError, ValueError) as error:
        # The latter two are how a file that an environment reads, such as a robot's model, is found missing or broken.
        raise ApportionError(f"Gymnasium cannot make {id}: {_first(error)}") from error
    except TypeError as error:
        if not film:
            raise
        raise ApportionError(f"{id} draws no picture: {_first(error)}") from None


def _newest(ids: Any) -> list[str]:
    """The newest version of each id.

    >>> _newest(["A-v1", "A-v10", "A-v9", "B"])
    ['A-v10', 'B']
    """
    best: dict[str, tuple[int, str]] = {}
    for id in ids:
        name, _, version = id.rpartition("-v")
        if not version.isdigit():
            name, version = id, "0"
        best[name] = max(best.get(name, (-1, "")), (int(version), id))
    return [id for _, id in best.values()]
