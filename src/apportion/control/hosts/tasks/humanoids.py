"""Ant, Humanoid and HumanoidStandup: free bodies whose contact forces are seen and paid for.

Source: gymnasium/envs/mujoco/{ant,humanoid,humanoidstandup}_v5.py.
"""

from __future__ import annotations

import numpy as np

from apportion.control.hosts.tasks.base import Array, Move, Noise, Physics, Task, Terms, inside, never, squares


def _flat(x: Array) -> Array:
    return x.reshape(len(x), -1)


def _torso_x(s: Physics) -> Array:
    """Position of the torso along x, m."""
    return s["torso"][:, 0].copy()


def _centre_x(s: Physics) -> Array:
    """Centre of mass along x, m."""
    return np.einsum("b,mb->m", s.body_mass, s["xipos"][:, :, 0]) / s.body_mass.sum()


def _ant_forces(task: Task, s: Physics) -> Array:
    return np.clip(s["cfrc_ext"], *task.ranges["force"])


def _observe_ant(task: Task, s: Physics) -> Array:
    """Positions without x and y, velocities, clipped contact forces (the world's left out)."""
    return np.concatenate([s["qpos"][:, 2:], s["qvel"], _flat(_ant_forces(task, s)[:, 1:])], 1)


def _score_ant(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Speed less effort less contact, plus a bonus while upright."""
    w, (low, high) = task.weights, task.ranges["height"]
    height = s["qpos"][:, 2]
    healthy = (low <= height) & (height <= high)
    healthy &= np.isfinite(s["qpos"]).all(1) & np.isfinite(s["qvel"]).all(1)
    terms = {
        "reward_forward": move.velocity * w["forward"],
        "reward_ctrl": -(w["ctrl"] * squares(move.action)),
        "reward_contact": -(w["contact"] * squares(_ant_forces(task, s))),
        "reward_survive": healthy * w["survive"],
    }
    return terms, ~healthy


def _observe_humanoid(task: Task, s: Physics) -> Array:
    """Positions without x and y, velocities, inertias, body velocities, actuator forces, contact forces."""
    return np.concatenate(
        [
            s["qpos"][:, 2:],
            s["qvel"],
            _flat(s["cinert"][:, 1:]),
            _flat(s["cvel"][:, 1:]),
            s["qfrc_actuator"][:, 6:],
            _flat(s["cfrc_ext"][:, 1:]),
        ],
        1,
    )


def _contact_cost(task: Task, s: Physics) -> Array:
    return np.clip(task.weights["contact"] * squares(s["cfrc_ext"]), *task.ranges["contact"])


def _score_humanoid(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Speed less effort less contact, plus a bonus while upright. The effort is that of ctrl, as in Gymnasium."""
    w = task.weights
    healthy = inside(s["qpos"][:, 2], task.ranges["height"])
    terms = {
        "reward_forward": w["forward"] * move.velocity,
        "reward_survive": healthy * w["survive"],
        "reward_ctrl": -(w["ctrl"] * squares(s["ctrl"])),
        "reward_contact": -_contact_cost(task, s),
    }
    return terms, ~healthy


def _score_standup(task: Task, s: Physics, move: Move) -> tuple[Terms, Array]:
    """Height per substep's duration, less effort, less impact, plus one; no end."""
    w = task.weights
    terms = {
        "reward_linup": w["up"] * s["qpos"][:, 2] / s.timestep,
        "reward_quadctrl": -(w["ctrl"] * squares(s["ctrl"])),
        "reward_impact": -_contact_cost(task, s),
        # Gymnasium adds it without naming it.
        "reward_constant": np.ones(len(s["qpos"])),
    }
    return terms, never(s)


_HUMANOID_FIELDS = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")

ANT = Task(
    id="Ant-v5",
    xml="ant.xml",
    frame_skip=5,
    horizon=1000,
    observe=_observe_ant,
    score=_score_ant,
    noise=Noise(0.1, 0.1, normal=True),
    weights={"forward": 1.0, "ctrl": 0.5, "contact": 5e-4, "survive": 1.0},
    ranges={"height": (0.2, 1.0), "force": (-1.0, 1.0)},
    fields=("cfrc_ext",),
    bodies=("torso",),
    position=_torso_x,
)

HUMANOID = Task(
    id="Humanoid-v5",
    xml="humanoid.xml",
    frame_skip=5,
    horizon=1000,
    observe=_observe_humanoid,
    score=_score_humanoid,
    noise=Noise(0.01, 0.01),
    weights={"forward": 1.25, "ctrl": 0.1, "contact": 5e-7, "survive": 5.0},
    ranges={"height": (1.0, 2.0), "contact": (-np.inf, 10.0)},
    fields=(*_HUMANOID_FIELDS, "xipos"),
    position=_centre_x,
)

HUMANOID_STANDUP = Task(
    id="HumanoidStandup-v5",
    xml="humanoidstandup.xml",
    frame_skip=5,
    horizon=1000,
    observe=_observe_humanoid,
    score=_score_standup,
    noise=Noise(0.01, 0.01),
    weights={"up": 1.0, "ctrl": 0.1, "contact": 5e-7},
    ranges={"contact": (-np.inf, 10.0)},
    fields=_HUMANOID_FIELDS,
)
