"""Pendulum-v1: swing a pendulum up and hold it there with too weak a motor.

Source: Gymnasium ``envs/classic_control/pendulum.py`` with its default gravity; the under-powered pendulum
swing-up is K. Doya's, "Reinforcement learning in continuous time and space" (2000).
"""

import math

import jax
import jax.numpy as jnp

from apportion.control.simulators.base import Simulator

GRAVITY = 10.0  # m/s^2; mass 1 kg, length 1 m
TIMESTEP = 0.05  # s
MAX_SPIN = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
TURN = 2 * math.pi


def reset(key: jax.Array) -> jax.Array:
    """Draw the angle from upright from U(-pi, pi) (rad) and its velocity from U(-1, 1) (rad/s): ``[2]``."""
    high = jnp.array([math.pi, 1.0])
    return jax.random.uniform(key, (2,), minval=-high, maxval=high)


def observe(state: jax.Array) -> jax.Array:
    """Show cos and sin of the angle, and the angular velocity: ``[3]``."""
    angle, spin = state
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), spin])


def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply torque ``action`` ``[1]`` (N m, clipped to [-2, 2]) for 0.05 s, semi-implicit Euler.

    The reward is minus the cost of the state *before* the step and of the clipped torque. Never terminates.
    """
    angle, spin = state
    torque = jnp.clip(action[0], -MAX_TORQUE, MAX_TORQUE).astype(state.dtype)
    # The state counts full turns, the cost does not. The sign at exactly half a turn is lost in the square.
    tilt = angle - TURN * jnp.round(angle / TURN)
    reward = -(tilt * tilt + 0.1 * spin * spin + 0.001 * torque * torque)
    spin = spin + TIMESTEP * (1.5 * GRAVITY * jnp.sin(angle) + 3.0 * torque)
    spin = jnp.clip(spin, -MAX_SPIN, MAX_SPIN)
    state = jnp.stack([angle + TIMESTEP * spin, spin])
    return state, reward, jnp.zeros((), bool)


PENDULUM = Simulator(
    id="Pendulum-v1",
    observation_size=3,
    action_count=0,
    action_size=1,
    action_low=(-MAX_TORQUE,),
    action_high=(MAX_TORQUE,),
    horizon=200,
    reset=reset,
    observe=observe,
    step=step,
)
