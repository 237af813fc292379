"""Reacher and Pusher: arms paid for distances, with goals drawn at reset.

Source: gymnasium/envs/mujoco/{reacher,pusher}_v5.py.
"""

from __future__ import annotations

import numpy as np

from apportion.control.hosts.tasks.base import Array, Move, Noise, Physics, Task, Terms, never, squares


def _distance(a: Array, b: Array) -> Array:
    return np.linalg.norm(a - b, axis=1)


def _start_reacher(task: Task, rng: np.random.Generator, qpos: Array, qvel: Array) -> tuple[Array, Array]:
    """A noisy arm, and a target that is uniform on the disc of radius 0.2 m and at rest."""
    noise = task.noise
    start = rng.uniform(-noise.position, noise.position, size=qpos.shape) + qpos
    goal = np.full(2, np.inf)
    while np.linalg.norm(goal) >= 0.2:
        goal = rng.uniform(-0.2, 0.2, size=2)
    start[-2:] = goal
    velocity = qvel + rng.uniform(-noise.velocity, noise.velocity, size=qvel.shape)
    velocity[-2:] = 0
    return start, velocity


def _observe_reacher(task: Task, s: Physics) -> Array:
    """Cosines and sines of the two joints, the target, the joints' velocities, fingertip to target in the plane."""
    angle = s["qpos"][:, :2]
    gap = (s["fingertip"] - s["target"])[:, :2]
    return np.concatenate([np.cos(angle), np.sin(angle), s["qpos"][:, 2:], s["qvel"][:, :2], gap], 1)


def _score_reacher(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Minus distance and effort; no end."""
    w = task.weights
    return {
        "reward_dist": -_distance(s["fingertip"], s["target"]) * w["dist"],
        "reward_ctrl": -squares(move.action) * w["ctrl"],
    }, never(s)


def _start_pusher(task: Task, rng: np.random.Generator, qpos: Array, qvel: Array) -> tuple[Array, Array]:
    """The default arm, an object somewhere at least 0.17 m from the goal, the goal at the origin."""
    start, goal = qpos.copy(), np.zeros(2)
    place = goal
    while np.linalg.norm(place - goal) <= 0.17:
        place = np.concatenate([rng.uniform(-0.3, 0, size=1), rng.uniform(-0.2, 0.2, size=1)])
    start[-4:-2], start[-2:] = place, goal
    velocity = qvel + rng.uniform(-task.noise.velocity, task.noise.velocity, size=qvel.shape)
    velocity[-4:] = 0
    return start, velocity


def _observe_pusher(task: Task, s: Physics) -> Array:
    """The seven joints' angles and velocities, then the positions of tip, object and goal."""
    return np.concatenate([s["qpos"][:, :7], s["qvel"][:, :7], s["tips_arm"], s["object"], s["goal"]], 1)


def _score_pusher(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Minus object to goal, effort, and tip to object; no end."""
    w = task.weights
    return {
        "reward_dist": -_distance(s["object"], s["goal"]) * w["dist"],
        "reward_ctrl": -squares(move.action) * w["ctrl"],
        "reward_near": -_distance(s["object"], s["tips_arm"]) * w["near"],
    }, never(s)


REACHER = Task(
    id="Reacher-v5",
    xml="reacher.xml",
    frame_skip=2,
    horizon=50,
    observe=_observe_reacher,
    score=_score_reacher,
    start=_start_reacher,
    noise=Noise(0.1, 5e-3),
    weights={"dist": 1.0, "ctrl": 1.0},
    bodies=("fingertip", "target"),
)

PUSHER = Task(
    id="Pusher-v5",
    xml="pusher_v5.xml",
    frame_skip=5,
    horizon=100,
    observe=_observe_pusher,
    score=_score_pusher,
    start=_start_pusher,
    noise=Noise(0.0, 5e-3),
    weights={"near": 0.5, "dist": 1.0, "ctrl": 0.1},
    bodies=("tips_arm", "object", "goal"),
)
