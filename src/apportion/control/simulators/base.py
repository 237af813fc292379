"""What every jitted simulator is: a row of physical state and three pure functions on it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Simulator:
    """One control task, written for a single environment; ``jax.vmap`` gives the batch.

    The state is a flat row ``[D]`` that holds the whole physics and nothing else (no clock, no random
    key), so that copying a row starts an exact sibling. Arithmetic follows the dtype of the state:
    float64 rows reproduce Gymnasium, float32 rows are what training runs on.

    Attributes:
        id: The Gymnasium id of the same task.
        observation_size: ``O``.
        action_count: Number of discrete actions; 0 when actions are continuous.
        action_size: ``A``, the dimensions of a continuous action; 0 when actions are discrete.
        action_low: Lower bound of each action dimension, ``A`` floats; empty when discrete.
        action_high: Upper bound of each action dimension, ``A`` floats; empty when discrete.
        horizon: The time limit of Gymnasium's registration, in steps.
        reset: ``key -> state [D]``, a draw from the start-state distribution.
        observe: ``state [D] -> observation [O]``.
        step: ``(state [D], action) -> (next state [D], reward [], terminated [] bool)``. A discrete action
            is an integer scalar, a continuous one is ``[A]``; ``step`` clips the force as Gymnasium does,
            so out-of-bound actions are legal.
    """

    id: str
    observation_size: int
    action_count: int
    action_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    horizon: int
    reset: Callable[[jax.Array], jax.Array]
    observe: Callable[[jax.Array], jax.Array]
    step: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]

    def truncated(self, clock: jax.Array) -> jax.Array:
        """Whether the time limit cuts the episode, as ``gymnasium.wrappers.TimeLimit`` decides it.

        The limit belongs to the episode and not to the physics, so the caller counts.

        Args:
            clock: Steps taken since reset, the one just made included; any shape.

        Returns:
            Booleans of the same shape. A step can be both terminated and truncated.
        """
        return clock >= self.horizon
