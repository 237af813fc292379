"""InvertedPendulum and InvertedDoublePendulum: poles on a cart, paid for standing.

Source: gymnasium/envs/mujoco/{inverted_pendulum,inverted_double_pendulum}_v5.py.
"""

from __future__ import annotations

import numpy as np

from apportion.control.hosts.tasks.base import Array, Move, Noise, Physics, Task, Terms, inside


def _observe_single(task: Task, s: Physics) -> Array:
    """Positions and velocities of cart and pole."""
    return np.concatenate([s["qpos"], s["qvel"]], 1)


def _score_single(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """One for each step that ends upright and finite."""
    low, high = task.ranges["angle"]
    angle = s["qpos"][:, 1]
    standing = (low <= angle) & (angle <= high) & np.isfinite(s["qpos"]).all(1) & np.isfinite(s["qvel"]).all(1)
    return {"reward_survive": standing * task.weights["survive"]}, ~standing


def _observe_double(task: Task, s: Physics) -> Array:
    """Cart, sines and cosines of the poles, clipped velocities, the cart's constraint force."""
    angle = s["qpos"][:, 1:]
    force = np.clip(s["qfrc_constraint"][:, :1], -10, 10)
    return np.concatenate([s["qpos"][:, :1], np.sin(angle), np.cos(angle), np.clip(s["qvel"], -10, 10), force], 1)


def _score_double(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Ten for standing, less the tip's distance from the top and the poles' speed."""
    w = task.weights
    x, height = s["site_xpos"][:, 0, 0], s["site_xpos"][:, 0, 2]
    v1, v2 = s["qvel"][:, 1], s["qvel"][:, 2]
    standing = inside(height, task.ranges["height"])
    return {
        "reward_survive": w["survive"] * standing,
        "distance_penalty": -(w["x"] * x**2 + w["height"] * (height - 2) ** 2),
        "velocity_penalty": -(w["v1"] * v1**2 + w["v2"] * v2**2),
    }, ~standing


INVERTED_PENDULUM = Task(
    id="InvertedPendulum-v5",
    xml="inverted_pendulum.xml",
    frame_skip=2,
    horizon=1000,
    observe=_observe_single,
    score=_score_single,
    noise=Noise(0.01, 0.01),
    weights={"survive": 1.0},
    ranges={"angle": (-0.2, 0.2)},
)

INVERTED_DOUBLE_PENDULUM = Task(
    id="InvertedDoublePendulum-v5",
    xml="inverted_double_pendulum.xml",
    frame_skip=5,
    horizon=1000,
    observe=_observe_double,
    score=_score_double,
    noise=Noise(0.1, 0.1, normal=True),
    weights={"survive": 10.0, "x": 0.01, "height": 1.0, "v1": 1e-3, "v2": 5e-3},
    ranges={"height": (1.0, np.inf)},
    fields=("site_xpos", "qfrc_constraint"),
)
