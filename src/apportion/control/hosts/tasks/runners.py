"""HalfCheetah, Hopper, Walker2d and Swimmer: planar bodies paid for forward speed.

Source: gymnasium/envs/mujoco/{half_cheetah,hopper,walker2d,swimmer}_v5.py.
"""

from __future__ import annotations

import numpy as np

from apportion.control.hosts.tasks.base import (
    Array,
    Move,
    Noise,
    Physics,
    Task,
    Terms,
    inside,
    never,
    root_x,
    squares,
)


def _observe_free(task: Task, s: Physics) -> Array:
    """Positions without x (without x and y for the swimmer), then velocities."""
    hidden = 2 if task.id.startswith("Swimmer") else 1
    return np.concatenate([s["qpos"][:, hidden:], s["qvel"]], 1)


def _observe_clipped(task: Task, s: Physics) -> Array:
    """Positions without x, then velocities clipped to ±10."""
    return np.concatenate([s["qpos"][:, 1:], np.clip(s["qvel"], -10, 10)], 1)


def _run(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Speed less effort; no end."""
    w = task.weights
    return {"reward_forward": w["forward"] * move.velocity, "reward_ctrl": -(w["ctrl"] * squares(move.action))}, never(
        s
    )


def _run_upright(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Speed less effort plus a bonus while healthy; the end is when it is not."""
    healthy = inside(s["qpos"][:, 1], task.ranges["height"]) & inside(s["qpos"][:, 2], task.ranges["angle"])
    if "state" in task.ranges:
        bounds = task.ranges["state"]
        healthy &= inside(s["qpos"][:, 2:], bounds).all(1) & inside(s["qvel"], bounds).all(1)
    terms, _ = _run(task, s, move)
    return {**terms, "reward_survive": healthy * task.weights["survive"]}, ~healthy


HALF_CHEETAH = Task(
    id="HalfCheetah-v5",
    xml="half_cheetah.xml",
    frame_skip=5,
    horizon=1000,
    observe=_observe_free,
    score=_run,
    noise=Noise(0.1, 0.1, normal=True),
    weights={"forward": 1.0, "ctrl": 0.1},
    position=root_x,
)

SWIMMER = Task(
    id="Swimmer-v5",
    xml="swimmer.xml",
    frame_skip=4,
    horizon=1000,
    observe=_observe_free,
    score=_run,
    noise=Noise(0.1, 0.1),
    weights={"forward": 1.0, "ctrl": 1e-4},
    position=root_x,
)

HOPPER = Task(
    id="Hopper-v5",
    xml="hopper.xml",
    frame_skip=4,
    horizon=1000,
    observe=_observe_clipped,
    score=_run_upright,
    noise=Noise(5e-3, 5e-3),
    weights={"forward": 1.0, "ctrl": 1e-3, "survive": 1.0},
    ranges={"height": (0.7, np.inf), "angle": (-0.2, 0.2), "state": (-100.0, 100.0)},
    position=root_x,
)

WALKER2D = Task(
    id="Walker2d-v5",
    xml="walker2d_v5.xml",
    frame_skip=4,
    horizon=1000,
    observe=_observe_clipped,
    score=_run_upright,
    noise=Noise(5e-3, 5e-3),
    weights={"forward": 1.0, "ctrl": 1e-3, "survive": 1.0},
    ranges={"height": (0.8, 2.0), "angle": (-1.0, 1.0)},
    position=root_x,
)
