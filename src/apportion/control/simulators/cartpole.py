"""CartPole-v1: balance a pole on a cart that is pushed left or right.

Source: Gymnasium ``envs/classic_control/cartpole.py``; A. G. Barto, R. S. Sutton and C. W. Anderson,
"Neuronlike adaptive elements that can solve difficult learning control problems" (1983); the equations
of motion without friction are R. V. Florian's "Correct equations for the dynamics of the cart-pole
system" (2007).
"""

import math

import jax
import jax.numpy as jnp

from apportion.control.simulators.base import Simulator

GRAVITY = 9.8  # m/s^2
CART_MASS = 1.0  # kg
POLE_MASS = 0.1  # kg
HALF_LENGTH = 0.5  # m, pivot to the pole's centre of mass
FORCE = 10.0  # N
TIMESTEP = 0.02  # s
MAX_POSITION = 2.4  # m
MAX_ANGLE = math.radians(12.0)

TOTAL_MASS = CART_MASS + POLE_MASS
# The constants are folded here because at training batch sizes a step costs its number of operations.
PUSH = FORCE / TOTAL_MASS
POLE_SHARE = POLE_MASS * HALF_LENGTH / TOTAL_MASS


def reset(key: jax.Array) -> jax.Array:
    """Draw position (m), velocity, angle (rad) and angular velocity from U(-0.05, 0.05): ``[4]``."""
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def observe(state: jax.Array) -> jax.Array:
    """Show the whole state ``[4]``: position, velocity, angle from upright, angular velocity."""
    return state


def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Push left (0) or right (1) for 0.02 s, explicit Euler; reward 1, also on the step that falls."""
    position, velocity, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = jnp.where(action == 1, PUSH, -PUSH) + POLE_SHARE * spin * spin * sin
    spin_rate = (GRAVITY * sin - cos * push) / (HALF_LENGTH * 4.0 / 3.0 - POLE_SHARE * cos * cos)
    acceleration = push - POLE_SHARE * spin_rate * cos
    state = state + TIMESTEP * jnp.stack([velocity, acceleration, spin, spin_rate])
    terminated = (jnp.abs(state[0]) > MAX_POSITION) | (jnp.abs(state[2]) > MAX_ANGLE)
    return state, jnp.ones_like(position), terminated


CARTPOLE = Simulator(
    id="CartPole-v1",
    observation_size=4,
    action_count=2,
    action_size=0,
    action_low=(),
    action_high=(),
    horizon=500,
    reset=reset,
    observe=observe,
    step=step,
)
