"""What every simulator outside of jit is: M simulations that are reset, stepped, copied and restored by row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from apportion.core.errors import ApportionError, InvalidData

Array = NDArray[Any]
Ids = ArrayLike | None
"""Which simulations: indices, a boolean mask ``[M]``, or None for all."""

NO_LIMIT = 2**31 - 1
"""The horizon of a task that is registered without a time limit."""


class Step(NamedTuple):
    """What one step gave. Simulations that were not stepped, or broke, have reward 0.

    reward: float64 ``[M]``. terminated: bool ``[M]``, the task's own end. broken: bool ``[M]``, the simulation went
    non-finite; its episode is over, and its last transition belongs in no loss. Never both.
    """

    reward: Array
    terminated: Array
    broken: Array


@dataclass(frozen=True)
class Capabilities:
    """What an environment can do for groups.

    snapshot: states can be copied exactly. seeded: a reset with the same seed gives the same start, and the same
    actions the same episode. lacks: for whichever of the two is False, one clause that says why; empty when both hold.
    replays: an episode is repeated by its random stream at the reset and its actions, whatever came before it.
    """

    snapshot: bool
    seeded: bool
    lacks: str = ""
    replays: bool = False


class Host(ABC):
    """M simulations of one task on the host. Nothing resets by itself: the step after an end is the caller's to choose.

    The time limit belongs to the episode and not to the physics: `truncated` reads the clock, and the engine decides.

    Attributes:
        id: The Gymnasium id of the task.
        size: ``M``.
        observation_size: ``O``.
        action_count: Number of discrete actions; 0 when actions are continuous.
        action_size: ``A``; 0 when actions are discrete.
        action_low, action_high: Bounds, ``A`` floats each; empty when discrete. Actions beyond them are handed on
            as they are, exactly as Gymnasium does: clip first (the log-probability stays that of the unclipped one).
        horizon: The time limit of Gymnasium's registration, in steps; `NO_LIMIT` without one.
        row_size: Entries of a snapshot row; 0 where rows are opaque objects, which no file can hold.
        history_size: Entries of a row of `history`; 0 where none is kept.
        clock: Steps since reset, int64 ``[M]``; part of a snapshot.
        fps: Steps in a second, for films.
        terms: The named parts of the last step's reward, each float64 ``[M]``; they add up to it. Empty where the
            task does not say.
    """

    id: str
    size: int
    observation_size: int
    action_count: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    horizon: int
    row_size: int
    history_size: int = 0
    clock: Array
    terms: dict[str, Array]
    fps: float

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What `snapshot` and seeded resets can promise here."""

    @abstractmethod
    def reset(self, ids: Ids = None, seeds: int | Sequence[int] | None = None) -> None:
        """Start new episodes.

        Args:
            ids: The simulations.
            seeds: One seed each; equal seeds give equal starts. An integer s means s + i for simulation i.
                None goes on with each simulation's own stream.

        Raises:
            InvalidData: When ids or seeds do not fit.
        """

    @abstractmethod
    def observe(self) -> Array:
        """The observations ``[M O]``, floating and finite, not a view; rows of unstepped simulations do not change."""

    @abstractmethod
    def step(self, actions: ArrayLike, live: Ids = None) -> Step:
        """Step the live simulations; the others do not move.

        Args:
            actions: ``[M A]`` floats, or ``[M]`` integers from 0; rows of the others are ignored.
            live: The simulations to step.

        Raises:
            InvalidData: When the shape is wrong.
        """

    @abstractmethod
    def snapshot(self, ids: Ids = None) -> Array:
        """Everything that the future of these simulations depends on, one row each: ``rows[[0, 0, 0]]`` is legal.

        Raises:
            ApportionError: When the environment cannot be copied.
        """

    @abstractmethod
    def restore(self, ids: Ids, rows: Array) -> None:
        """Put simulations into snapshot states; the same actions then give bitwise the same future.

        Args:
            ids: The simulations.
            rows: As many rows, or one row for all of them (exact siblings).

        Raises:
            ApportionError: When the environment cannot be copied, or rows belong to another task.
        """

    def history(self) -> Array:
        """How each simulation's episode came to stand where it does, float64 ``[M history_size]``, fit for a file."""
        return np.zeros((self.size, self.history_size))

    def replay(self, rows: Array) -> None:  # noqa: B027  nothing to do where no history is kept
        """Live through the episodes of `history` again, in a host that has not."""

    @abstractmethod
    def reseed(self, ids: Ids, seeds: int | Sequence[int]) -> None:
        """Give simulations new random streams without touching their state.

        Restored siblings share one stream too, and so would meet the same noise and the same next start.
        """

    @abstractmethod
    def frame(self, index: int, camera: str | None = None) -> Array:
        """A picture of one simulation, uint8 ``[height width 3]``.

        Args:
            index: The simulation.
            camera: A camera of the model, None for the usual one.

        Raises:
            UnknownName: When there is no such camera.
            ApportionError: When nothing can be drawn here; the message says what is missing.
        """

    def truncated(self) -> Array:
        """Whether the time limit cuts each episode, bool ``[M]``: ``clock >= horizon``."""
        return self.clock >= self.horizon

    def reset_group(self, ids: Ids, seed: int) -> None:
        """Start these simulations from one common start state, by the seed or else by copying.

        Raises:
            ApportionError: When the environment offers neither; the message says what it lacks.
        """
        chosen = indices(ids, self.size)
        can = self.capabilities
        if can.seeded:
            self.reset(chosen, [seed] * len(chosen))
        elif can.snapshot:
            self.reset(chosen[:1], [seed])
            self.restore(chosen, self.snapshot(chosen[:1]))
        else:
            raise ApportionError(f"{self.id} cannot start a group from one state: {can.lacks}")

    def close(self) -> None:  # noqa: B027  most hosts hold nothing that needs it
        """Release what the simulations hold."""


def indices(ids: Ids, size: int) -> Array:
    """Integer ids from ids, a mask or None; unique, in the order given.

    Raises:
        InvalidData: When an id is out of range, repeated or not an integer, or the mask has another length.

    >>> indices([False, True, True], 3).tolist()
    [1, 2]
    """
    if ids is None:
        return np.arange(size)
    chosen = np.asarray(ids)
    if chosen.dtype == bool:
        if chosen.shape != (size,):
            raise InvalidData(f"the mask has shape {chosen.shape}; {size} simulations need ({size},)")
        return np.flatnonzero(chosen)
    chosen = np.atleast_1d(chosen)
    if chosen.size == 0:
        return np.zeros(0, np.int64)
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        raise InvalidData(f"ids must be a list of integers or a mask, not {chosen.dtype} of shape {chosen.shape}")
    if chosen.min() < 0 or chosen.max() >= size:
        raise InvalidData(f"ids must be in [0, {size}); got {chosen.min()} to {chosen.max()}")
    if len(np.unique(chosen)) != len(chosen):
        raise InvalidData("ids must not repeat")
    return chosen.astype(np.int64)


def seeds_for(ids: Array, seeds: int | Sequence[int]) -> list[int]:
    """One seed per id; an integer s counts up as Gymnasium's vector environments do (s + i for simulation i).

    Raises:
        InvalidData: When the number of seeds is wrong or one is negative.

    >>> seeds_for(np.arange(3), 7)
    [7, 8, 9]
    """
    each = [seeds + int(i) for i in ids] if isinstance(seeds, int | np.integer) else [int(s) for s in seeds]
    if len(each) != len(ids):
        raise InvalidData(f"{len(each)} seeds for {len(ids)} simulations")
    if any(s < 0 for s in each):
        raise InvalidData(f"seeds must be 0 or more; got {min(each)}")
    return each


def actions_for(actions: ArrayLike, host: Host, live: Array) -> Array:
    """Actions in the shape that the host steps, their floating type kept.

    Raises:
        InvalidData: When shape or type does not fit, or the discrete action of a live simulation is out of range.
    """
    given = np.asarray(actions)
    shape = (host.size,) if host.action_count else (host.size, host.action_size)
    if given.shape != shape:
        raise InvalidData(f"actions of {host.id} have shape {given.shape}; {host.size} simulations need {shape}")
    if not host.action_count:
        return given if np.issubdtype(given.dtype, np.floating) else given.astype(np.float64)
    if not np.issubdtype(given.dtype, np.integer):
        raise InvalidData(f"actions of {host.id} are {given.dtype}; they must be integers")
    bad = [int(a) for a in given[live] if not 0 <= a < host.action_count]
    if bad:
        raise InvalidData(f"actions of {host.id} must be in [0, {host.action_count}); got {bad[0]}")
    return given
