"""Policies and critics on vector observations: plain MLPs, categorical or Gaussian heads.

Parameters are a pytree of float32 arrays; every function is pure and takes a batch ``[..., O]``.

Inside, the batch is the last axis ([features, batch]): on a CPU the gradient of a weight is then a product of two
row-major matrices, about twice as fast as with the batch first, and softmax over few actions runs along long rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from apportion.control.hosts.world import World
from apportion.control.simulators import Simulator

Parameters = Any

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "swish": jax.nn.swish}
OBSERVED_CLIP = 10.0
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def orthogonal(key: jax.Array, rows: int, columns: int, gain: float) -> jax.Array:
    """A random matrix [rows columns] with orthonormal rows or columns (whichever are fewer), times gain.

    Gram-Schmidt, each vector twice for rounding, on normal draws. `jax.nn.initializers.orthogonal` calls LAPACK, which
    under `vmap` waits inside XLA's CPU thread pool for a task of the same pool: with two cores it never returns.
    """
    count, length = min(rows, columns), max(rows, columns)
    draws = jax.random.normal(key, (count, length), jnp.float32)

    def add(i: jax.Array, basis: jax.Array) -> jax.Array:
        vector = draws[i]
        for _ in range(2):
            vector = vector - (basis @ vector) @ basis
        return basis.at[i].set(vector / jnp.linalg.norm(vector))

    basis = jax.lax.fori_loop(0, count, add, jnp.zeros_like(draws))
    return gain * (basis if rows <= columns else basis.T)


def _mlp_init(key: jax.Array, sizes: tuple[int, ...], gain: float) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    gains = [math.sqrt(2)] * (len(sizes) - 2) + [gain]
    return [
        {"w": orthogonal(k, o, i, g), "b": jnp.zeros((o, 1), jnp.float32)}
        for k, i, o, g in zip(keys, sizes[:-1], sizes[1:], gains, strict=True)
    ]


@dataclass(frozen=True)
class Policy:
    """An actor and, when `critic` is set, a separate critic of the same shape.

    observation_size: O. action_count: discrete actions, 0 when continuous. action_size: A, 0 when discrete.
    hidden: widths. activation: "tanh", "relu" or "swish". log_std: initial log standard deviation of a
    Gaussian policy (state-independent, learned). Initialisation: orthogonal, heads 0.01 (actor) and 1 (critic),
    after Andrychowicz et al. 2021, section 3.2.

    normalise: whether a trained policy's parameters hold, under "observed", the mean [O] and scale [O] that
    observations are normalised by (clipped to ±`OBSERVED_CLIP`). They are statistics and not trained: `init` leaves
    them out, and every function that finds none takes observations as they are.
    """

    observation_size: int
    action_count: int
    action_size: int
    critic: bool
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    log_std: float = 0.0
    normalise: bool = False

    @property
    def discrete(self) -> bool:
        """Whether actions are integers."""
        return self.action_count > 0

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: () when discrete, (A,) when continuous."""
        return () if self.discrete else (self.action_size,)

    def init(self, key: jax.Array) -> Parameters:
        """Fresh parameters."""
        actor, critic = jax.random.split(key)
        body = (self.observation_size, *self.hidden)
        parameters: dict[str, Any] = {"actor": _mlp_init(actor, (*body, self.action_count or self.action_size), 0.01)}
        if not self.discrete:
            parameters["log_std"] = jnp.full(self.action_size, self.log_std, jnp.float32)
        if self.critic:
            parameters["critic"] = _mlp_init(critic, (*body, 1), 1.0)
        return parameters

    def _mlp(self, layers: list[dict[str, jax.Array]], observation: jax.Array) -> jax.Array:
        """Output [features, B] for observations [..., O] flattened to B rows."""
        x = observation.reshape(-1, observation.shape[-1]).T
        for layer in layers[:-1]:
            x = ACTIVATIONS[self.activation](layer["w"] @ x + layer["b"])
        return layers[-1]["w"] @ x + layers[-1]["b"]

    def observed(self, parameters: Parameters, observation: jax.Array) -> jax.Array:
        """The observation as the networks see it: normalised where the parameters hold statistics."""
        if "observed" not in parameters:
            return observation
        statistics = parameters["observed"]
        x = (observation - statistics["mean"]) * statistics["scale"]
        return jnp.clip(x, -OBSERVED_CLIP, OBSERVED_CLIP)

    def _head(self, parameters: Parameters, observation: jax.Array) -> jax.Array:
        return self._mlp(parameters["actor"], self.observed(parameters, observation))

    def value(self, parameters: Parameters, observation: jax.Array) -> jax.Array:
        """Critic's value ``[...]``."""
        return self._mlp(parameters["critic"], self.observed(parameters, observation)).reshape(observation.shape[:-1])

    def noise(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The randomness that `sample` turns into actions: Gumbel ``[..., actions]`` or normal ``[..., A]``."""
        if self.discrete:
            return jax.random.gumbel(key, (*shape, self.action_count), jnp.float32)
        return jax.random.normal(key, (*shape, self.action_size), jnp.float32)

    def sample(
        self, parameters: Parameters, observation: jax.Array, noise: jax.Array, temperature: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Action and its log-probability (nats) under the distribution sampled; the action is not clipped."""
        head, noise = self._head(parameters, observation), noise.reshape(-1, noise.shape[-1]).T
        if self.discrete:
            action = jnp.argmax(head / temperature + noise, axis=0)
        else:
            action = head + temperature * jnp.exp(parameters["log_std"])[:, None] * noise
        logp = self._log_prob(parameters, head, action, temperature)
        batch = observation.shape[:-1]
        return action.T.reshape(*batch, *self.action_shape), logp.reshape(batch)

    def mode(self, parameters: Parameters, observation: jax.Array) -> jax.Array:
        """The most likely action."""
        head = self._head(parameters, observation)
        action = jnp.argmax(head, axis=0) if self.discrete else head.T
        return action.reshape(*observation.shape[:-1], *self.action_shape)

    def log_prob(
        self, parameters: Parameters, observation: jax.Array, action: jax.Array, temperature: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability and entropy (nats), each ``[...]``; temperature multiplies the spread."""
        batch = observation.shape[:-1]
        head = self._head(parameters, observation)
        action = action.reshape(-1, *self.action_shape).T
        logp = self._log_prob(parameters, head, action, temperature).reshape(batch)
        if self.discrete:
            all_logp = jax.nn.log_softmax(head / temperature, axis=0)
            return logp, -jnp.sum(jnp.exp(all_logp) * all_logp, axis=0).reshape(batch)
        entropy = jnp.sum(parameters["log_std"] + math.log(temperature) + 0.5 + _HALF_LOG_2PI)
        return logp, jnp.broadcast_to(entropy, batch)

    def divergence(self, old: Parameters, new: Parameters, observation: jax.Array) -> jax.Array:
        """KL(old || new) in nats at each observation, ``[...]``; untempered."""
        was, now = (self._head(p, observation) for p in (old, new))
        if self.discrete:
            was, now = jax.nn.log_softmax(was, axis=0), jax.nn.log_softmax(now, axis=0)
            return jnp.sum(jnp.exp(was) * (was - now), axis=0).reshape(observation.shape[:-1])
        was_std, now_std = (p["log_std"][:, None] for p in (old, new))
        spread = jnp.exp(2 * (was_std - now_std)) + ((was - now) * jnp.exp(-now_std)) ** 2
        return jnp.sum(now_std - was_std + (spread - 1) / 2, axis=0).reshape(observation.shape[:-1])

    def _log_prob(self, parameters: Parameters, head: jax.Array, action: jax.Array, temperature: float) -> jax.Array:
        """[B] from head [features, B] and action [B] or [A, B]."""
        if self.discrete:
            all_logp = jax.nn.log_softmax(head / temperature, axis=0)
            # A sum against the indicator vectorises where a gather would be a scalar loop.
            chosen = action == jnp.arange(self.action_count)[:, None]
            return jnp.sum(jnp.where(chosen, all_logp, 0.0), axis=0)
        log_std = parameters["log_std"][:, None] + math.log(temperature)
        z = (action - head) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - _HALF_LOG_2PI, axis=0)


def policy_for(simulator: Simulator | World, critic: bool, **shape: Any) -> Policy:
    """The policy whose heads fit the simulator's observations and actions."""
    return Policy(simulator.observation_size, simulator.action_count, simulator.action_size, critic, **shape)
