"""A task on the host before any simulation of it is made: what policies and plans need to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from apportion.control.hosts.base import Capabilities, Host


@dataclass(frozen=True)
class World:
    """One task whose simulations run outside of jit; the counterpart of `simulators.Simulator`.

    Attributes:
        id, observation_size, action_count, action_size, action_low, action_high, horizon: As in `Host`.
        open: ``size -> Host``, so many simulations of it.
    """

    id: str
    observation_size: int
    action_count: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    horizon: int
    open: Callable[[int], Host] = field(repr=False)

    @property
    def capabilities(self) -> Capabilities:
        """What its simulations can do for groups. Makes one to find out."""
        return _capabilities(self)


@lru_cache(maxsize=64)
def _capabilities(world: World) -> Capabilities:
    host = world.open(1)
    try:
        return host.capabilities
    finally:
        host.close()


def world_of(open: Callable[[int], Host]) -> World:
    """The world that `open` makes simulations of."""
    one = open(1)
    try:
        return World(
            id=one.id,
            observation_size=one.observation_size,
            action_count=one.action_count,
            action_size=one.action_size,
            action_low=one.action_low,
            action_high=one.action_high,
            horizon=one.horizon,
            open=open,
        )
    finally:
        one.close()
