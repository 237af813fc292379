"""MountainCar-v0 and MountainCarContinuous-v0: rock an under-powered car out of a valley.

Source: Gymnasium ``envs/classic_control/mountain_car.py`` and ``continuous_mountain_car.py``; A. W. Moore,
"Efficient memory-based learning for robot control" (1990).

The continuous Gymnasium task stores its state in float32 after every step and lets NumPy's promotion
rules decide the precision of each operation. Here the precision is the state's own, as in the other
simulators: a float64 step rounds to exactly Gymnasium's next state, but over a whole episode the two
drift apart by float32 rounding.
"""

import jax
import jax.numpy as jnp

from apportion.control.simulators.base import Simulator

MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07  # position units per step
GRAVITY = 0.0025
FORCE = 0.001  # discrete car: speed gained per step
POWER = 0.0015  # continuous car: speed gained per step at full throttle
GOAL = 0.5
CONTINUOUS_GOAL = 0.45


def reset(key: jax.Array) -> jax.Array:
    """Draw a position from U(-0.6, -0.4), at rest: ``[2]``, position and velocity (per step)."""
    position = jax.random.uniform(key, minval=-0.6, maxval=-0.4)
    return jnp.stack([position, jnp.zeros_like(position)])


def observe(state: jax.Array) -> jax.Array:
    """Show the whole state ``[2]``: position, velocity."""
    return state


def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accelerate left (0), not at all (1) or right (2); reward -1, also on the step that reaches the goal."""
    state, terminated = roll(state, (action - 1) * FORCE, GOAL)
    return state, -jnp.ones_like(state[0]), terminated


def step_continuous(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accelerate by ``action`` ``[1]``, clipped to [-1, 1]; reward 100 at the goal minus 0.1 action squared.

    The penalty is on the action as given, before clipping, as in Gymnasium.
    """
    throttle = action[0]
    state, terminated = roll(state, jnp.clip(throttle, -1.0, 1.0) * POWER, CONTINUOUS_GOAL)
    reward = 100.0 * terminated - 0.1 * throttle * throttle
    return state, reward.astype(state.dtype), terminated


def roll(state: jax.Array, thrust: jax.Array, goal: float) -> tuple[jax.Array, jax.Array]:
    """Move one step on the slope: the next state ``[2]``, and whether it is at the goal, moving on."""
    position, velocity = state
    velocity = velocity + (thrust - GRAVITY * jnp.cos(3 * position)).astype(state.dtype)
    velocity = jnp.clip(velocity, -MAX_SPEED, MAX_SPEED)
    position = jnp.clip(position + velocity, MIN_POSITION, MAX_POSITION)
    velocity = jnp.where(position <= MIN_POSITION, jnp.maximum(velocity, 0.0), velocity)  # a soft left wall
    terminated = (position >= goal) & (velocity >= 0.0)
    return jnp.stack([position, velocity]), terminated


MOUNTAIN_CAR = Simulator(
    id="MountainCar-v0",
    observation_size=2,
    action_count=3,
    action_size=0,
    action_low=(),
    action_high=(),
    horizon=200,
    reset=reset,
    observe=observe,
    step=step,
)

MOUNTAIN_CAR_CONTINUOUS = Simulator(
    id="MountainCarContinuous-v0",
    observation_size=2,
    action_count=0,
    action_size=1,
    action_low=(-1.0,),
    action_high=(1.0,),
    horizon=999,
    reset=reset,
    observe=observe,
    step=step_continuous,
)
