"""What a MuJoCo task is: data, and a few functions on arrays of M simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Terms = dict[str, Array]
Range = tuple[float, float]


@dataclass(frozen=True)
class Physics:
    """The simulations as a task sees them.

    Derived fields (``xpos``, ``cinert``, ``cfrc_ext`` and so on) describe the last substep's start, or its last
    Runge-Kutta stage, and not the state after it. That is what Gymnasium reads, so it is what the tasks read.

    Attributes:
        arrays: Field of MjData, or name of a body (its ``xpos``), to float64 ``[M ...]``.
        body_mass: Masses, ``[bodies]``.
        timestep: Seconds of one substep.
        dt: Seconds of one environment step.
    """

    arrays: Mapping[str, Array]
    body_mass: Array
    timestep: float
    dt: float

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def take(self, ids: Array) -> Physics:
        """A copy of some simulations."""
        return Physics({name: a[ids] for name, a in self.arrays.items()}, self.body_mass, self.timestep, self.dt)


class Move(NamedTuple):
    """What happened in a step. action: ``[M A]`` as given, dtype kept. velocity: forward, m/s, ``[M]``."""

    action: Array
    velocity: Array


class Noise(NamedTuple):
    """Reset noise: uniform in ±position on qpos; on qvel uniform in ±velocity, or normal with that scale."""

    position: float
    velocity: float
    normal: bool = False


def noisy_start(task: Task, rng: np.random.Generator, qpos: Array, qvel: Array) -> tuple[Array, Array]:
    """The model's default state plus the task's noise, drawn in Gymnasium's order. Does not write its arguments."""
    noise = task.noise
    start = qpos + rng.uniform(-noise.position, noise.position, size=qpos.shape)
    if noise.normal:
        return start, qvel + noise.velocity * rng.standard_normal(qvel.shape[0])
    return start, qvel + rng.uniform(-noise.velocity, noise.velocity, size=qvel.shape)


@dataclass(frozen=True)
class Task:
    """One Gymnasium MuJoCo task, version 5.

    Attributes:
        id: Gymnasium's id.
        xml: Model file in Gymnasium's assets.
        frame_skip: Physics substeps in one environment step.
        horizon: Time limit in environment steps.
        observe: ``(task, physics) -> [M O]``.
        score: ``(task, physics after, move) -> (reward terms [M] by Gymnasium's info name, terminated [M])``.
            The reward is the sum of the terms.
        fields: MjData fields to bind beside qpos, qvel and ctrl.
        bodies: Bodies whose positions are read.
        position: ``physics -> [M]``, what the forward velocity is the difference of; None without one.
        start: ``(task, generator, default qpos, default qvel) -> (qpos, qvel)`` of one simulation.
        noise: For `noisy_start`.
        weights: Of the reward terms.
        ranges: Of health, contact forces and costs.
    """

    id: str
    xml: str
    frame_skip: int
    horizon: int
    observe: Callable[[Task, Physics], Array]
    score: Callable[[Task, Physics, Move], tuple[Terms, Array]]
    noise: Noise
    weights: Mapping[str, float]
    ranges: Mapping[str, Range] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    bodies: tuple[str, ...] = ()
    position: Callable[[Physics], Array] | None = None
    start: Callable[[Task, np.random.Generator, Array, Array], tuple[Array, Array]] = noisy_start

    @property
    def contacts(self) -> bool:
        """Whether contact forces are read, which MuJoCo computes only when asked."""
        return "cfrc_ext" in self.fields


def squares(x: Array) -> Array:
    """Sum of squares over all axes but the first, in x's own dtype: float32 actions cost what Gymnasium says."""
    return np.square(x).reshape(len(x), -1).sum(1)


def inside(x: Array, bounds: Range) -> Array:
    """Strictly between the bounds; False for NaN."""
    return (bounds[0] < x) & (x < bounds[1])


def never(physics: Physics) -> Array:
    """Terminations of a task without an end of its own."""
    return np.zeros(len(physics["qpos"]), bool)


def root_x(physics: Physics) -> Array:
    """Position of the root along x, m."""
    return physics["qpos"][:, 0].copy()
