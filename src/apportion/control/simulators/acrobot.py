"""Acrobot-v1: swing the tip of a two-link pendulum above a line, with torque at the elbow only.

Source: Gymnasium ``envs/classic_control/acrobot.py`` with its default dynamics (the book's, not the NIPS
paper's); R. S. Sutton, "Generalization in reinforcement learning: successful examples using sparse coarse
coding" (1996); R. S. Sutton and A. G. Barto, "Reinforcement Learning: An Introduction" (2018).
"""

import math

import jax
import jax.numpy as jnp

from apportion.control.simulators.base import Simulator

GRAVITY = 9.8  # m/s^2
TIMESTEP = 0.2  # s
MAX_SPIN_1 = 4 * math.pi  # rad/s
MAX_SPIN_2 = 9 * math.pi  # rad/s
TURN = 2 * math.pi

# Both links: mass 1 kg, length 1 m, centre of mass at 0.5 m, moment of inertia 1 kg m^2. The coefficients
# of the equations of motion below follow from these.

Row = tuple[jax.Array, ...]  # two angles, then their velocities


def reset(key: jax.Array) -> jax.Array:
    """Draw both joint angles (rad) and their velocities (rad/s) from U(-0.1, 0.1), hanging down: ``[4]``."""
    return jax.random.uniform(key, (4,), minval=-0.1, maxval=0.1)


def observe(state: jax.Array) -> jax.Array:
    """Show cos and sin of the two joint angles, then the two angular velocities: ``[6]``."""
    angle_1, angle_2, spin_1, spin_2 = state
    return jnp.stack([jnp.cos(angle_1), jnp.sin(angle_1), jnp.cos(angle_2), jnp.sin(angle_2), spin_1, spin_2])


def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply torque ``action - 1`` (N m) for 0.2 s, one Runge-Kutta step; reward -1, or 0 at the goal.

    Terminates when the tip is more than one link length above the fixed pivot.
    """
    torque = (action - 1).astype(state.dtype)
    angle_1, angle_2, spin_1, spin_2 = runge_kutta(tuple(state), torque)
    angle_1, angle_2 = wrap(angle_1), wrap(angle_2)
    spin_1 = jnp.clip(spin_1, -MAX_SPIN_1, MAX_SPIN_1)
    spin_2 = jnp.clip(spin_2, -MAX_SPIN_2, MAX_SPIN_2)
    terminated = -jnp.cos(angle_1) - jnp.cos(angle_1 + angle_2) > 1.0
    reward = terminated.astype(state.dtype) - 1.0
    return jnp.stack([angle_1, angle_2, spin_1, spin_2]), reward, terminated


def runge_kutta(row: Row, torque: jax.Array) -> Row:
    """Integrate the motion over one time step by the classical fourth-order rule, unrolled.

    Rows are tuples of scalars and not arrays so that XLA fuses all four stages into one loop.
    """

    def advance(slope: Row, time: float) -> Row:
        return tuple(y + time * dy for y, dy in zip(row, slope, strict=True))

    k1 = derivative(row, torque)
    k2 = derivative(advance(k1, TIMESTEP / 2), torque)
    k3 = derivative(advance(k2, TIMESTEP / 2), torque)
    k4 = derivative(advance(k3, TIMESTEP), torque)
    total = tuple(a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
    return advance(total, TIMESTEP / 6)


def derivative(row: Row, torque: jax.Array) -> Row:
    """Time derivative of the two angles (rad/s) and of their velocities (rad/s^2)."""
    angle_1, angle_2, spin_1, spin_2 = row
    sin, cos = jnp.sin(angle_2), jnp.cos(angle_2)
    d1 = 3.5 + cos
    d2 = 1.25 + 0.5 * cos
    # Gymnasium writes the two gravity terms as cos(angle - pi/2).
    phi2 = 0.5 * GRAVITY * jnp.sin(angle_1 + angle_2)
    phi1 = -(0.5 * spin_2 + spin_1) * spin_2 * sin + 1.5 * GRAVITY * jnp.sin(angle_1) + phi2
    ratio = d2 / d1
    rate_2 = (torque + ratio * phi1 - 0.5 * spin_1 * spin_1 * sin - phi2) / (1.25 - d2 * ratio)
    rate_1 = -(d2 * rate_2 + phi1) / d1
    return spin_1, spin_2, rate_1, rate_2


def wrap(angle: jax.Array) -> jax.Array:
    """Bring an angle (rad) into [-pi, pi] by whole turns; an angle already inside is returned unchanged.

    Gymnasium subtracts one turn at a time in a loop. Counting the turns costs no loop, and both round the
    same for the first turn.
    """
    above = jnp.maximum(jnp.ceil((angle - math.pi) / TURN), 0.0)
    below = jnp.minimum(jnp.floor((angle + math.pi) / TURN), 0.0)
    return angle - TURN * (above + below)


ACROBOT = Simulator(
    id="Acrobot-v1",
    observation_size=6,
    action_count=3,
    action_size=0,
    action_low=(),
    action_high=(),
    horizon=500,
    reset=reset,
    observe=observe,
    step=step,
)
