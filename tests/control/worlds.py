"""Tiny tasks with known answers, and small methods that run on anything in moments."""

import jax
import jax.numpy as jnp

from apportion import methods
from apportion.control import Simulator
from apportion.core.parts import NoKL
from apportion.core.update import Adam


def probe(name, reset, step, observation_size=1):
    """A world of at most four steps with two actions whose state is its observation."""
    return Simulator(
        id=f"Probe-{name}",
        observation_size=observation_size,
        action_count=2,
        action_size=0,
        action_low=(),
        action_high=(),
        horizon=4,
        reset=reset,
        observe=lambda state: state,
        step=step,
    )


def one_state(key):
    return jnp.ones(1)


def coin(key):
    return jnp.where(jax.random.bernoulli(key), 1.0, -1.0)[None]


OVER = jnp.array(True)

CONSTANT = probe("constant", one_state, lambda s, a: (s, jnp.float32(1.0), OVER))
OBSERVED = probe("observed", coin, lambda s, a: (s, s[0], OVER))
DELAYED = probe("delayed", lambda key: jnp.zeros(1), lambda s, a: (s + 1, jnp.where(s[0] > 0, 1.0, 0.0), s[0] > 0))
ACTION = probe("action", one_state, lambda s, a: (s, jnp.where(a == 0, 1.0, -1.0), OVER))
MATCH = probe("match", coin, lambda s, a: (s, jnp.where((a == 1) == (s[0] > 0), 1.0, -1.0), OVER))

FAMILY = (
    "ppo",
    "a2c",
    "reinforce_togo",
    "reinforce_batch_mean",
    "rloo",
    "remax",
    "grpo",
    "dr_grpo",
    "dapo",
    "cispo",
    "gspo",
)


def small(name, **changes):
    """A catalogue entry without its KL, cut down to `changes` of the sampler, with a step that shows."""
    method = methods.METHODS[name]
    sampler = {"group": min(method.sampler.group, 4), "minibatches": min(method.sampler.minibatches, 2)} | changes
    return method.replace(kl=NoKL(), sampler=method.sampler.replace(**sampler), update=Adam(1e-2))
