"""Policies and critics on vector observations: plain MLPs, categorical, Gaussian or tanh-squashed Gaussian heads.

What a policy with a squash samples, scores and takes as its mode is the value u *before* it: that is what collections
store, so that no atanh is ever needed. `Policy.applied` turns it into the task's action,
low + (high - low)(tanh u + 1)/2. Log-probabilities are densities of that action: those of u less log |da/du| per
dimension, in a form that stays finite when tanh saturates: log(1 - tanh² u) = 2 (log 2 - u - softplus(-2u)).

Parameters are a pytree of float32 arrays; every function is pure and takes a batch ``[..., O]``.

Inside, the batch is the last axis ([features, batch]): on a CPU the gradient of a weight is then a product of two
row-major matrices, about twice as fast as with the batch first, and softmax over few actions runs along long rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from apportion.control.hosts.world import World
from apportion.control.simulators import Simulator

Parameters = Any

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "swish": jax.nn.swish}
OBSERVED_CLIP = 10.0
LOG_STD_BOUNDS = (-5.0, 2.0)
"""A state-dependent log standard deviation stays between these, after Yarats & Kostrikov 2020 (pytorch_sac)."""
Std = Literal["independent", "dependent"]
STDS: tuple[str, ...] = get_args(Std)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_LOG_STD_CENTER, _LOG_STD_HALF = (sum(LOG_STD_BOUNDS) / 2, (LOG_STD_BOUNDS[1] - LOG_STD_BOUNDS[0]) / 2)
_NODES = np.polynomial.hermite_e.hermegauss(32)
"""Points and weights of Gauss-Hermite quadrature, for the entropy of a squashed Gaussian."""


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
    Gaussian policy. Initialisation: orthogonal, heads 0.01 (actor) and 1 (critic), after Andrychowicz et al. 2021,
    section 3.2.

    std: "independent" of the state, one learned log standard deviation per dimension; or "dependent", a second half of
    the actor's head, kept within `LOG_STD_BOUNDS` by a tanh of slope one at their middle.
    squash: actions are tanh(u) scaled to the bounds low and high (A floats each; empty without a squash).

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
    std: Std = "independent"
    squash: bool = False
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

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
        heads = 2 if self.std == "dependent" else 1
        outputs = self.action_count or heads * self.action_size
        parameters: dict[str, Any] = {"actor": _mlp_init(actor, (*body, outputs), 0.01)}
        if self.std == "dependent":
            raw = _LOG_STD_CENTER + _LOG_STD_HALF * math.atanh((self.log_std - _LOG_STD_CENTER) / _LOG_STD_HALF)
            parameters["actor"][-1]["b"] = jnp.repeat(jnp.array([0.0, raw]), self.action_size)[:, None]
        elif not self.discrete:
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

    def _gaussian(self, parameters: Parameters, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean [A B] and log standard deviation, [A B] or [A 1], from the head."""
        if self.std == "independent":
            return head, parameters["log_std"][:, None]
        mean, raw = jnp.split(head, 2)
        return mean, _LOG_STD_CENTER + _LOG_STD_HALF * jnp.tanh((raw - _LOG_STD_CENTER) / _LOG_STD_HALF)

    def _log_slope(self, u: jax.Array) -> jax.Array:
        """log |da/du| of the squash, [A ...]; finite for every finite u."""
        scale = jnp.log((jnp.array(self.high) - jnp.array(self.low)) / 2)
        return scale.reshape(-1, *(1 for _ in u.shape[1:])) + 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))

    def applied(self, action: jax.Array) -> jax.Array:
        """What the task is given, [... A] or [...], for an action as it was sampled: squashed, or as it is."""
        if not self.squash:
            return action
        low, high = jnp.array(self.low), jnp.array(self.high)
        return low + (high - low) * (jnp.tanh(action) + 1) / 2

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
        """Action and its log-probability (nats) under the distribution sampled; neither clipped nor squashed yet."""
        head, noise = self._head(parameters, observation), noise.reshape(-1, noise.shape[-1]).T
        if self.discrete:
            action = jnp.argmax(head / temperature + noise, axis=0)
        else:
            mean, log_std = self._gaussian(parameters, head)
            action = mean + temperature * jnp.exp(log_std) * noise
        logp = self._log_prob(parameters, head, action, temperature)
        batch = observation.shape[:-1]
        return action.T.reshape(*batch, *self.action_shape), logp.reshape(batch)

    def mode(self, parameters: Parameters, observation: jax.Array) -> jax.Array:
        """The most likely action; of a squashed Gaussian the median, which is its mean before the squash."""
        head = self._head(parameters, observation)
        action = jnp.argmax(head, axis=0) if self.discrete else self._gaussian(parameters, head)[0].T
        return action.reshape(*observation.shape[:-1], *self.action_shape)

    def log_prob(
        self, parameters: Parameters, observation: jax.Array, action: jax.Array, temperature: float = 1.0
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probability and entropy (nats), each ``[...]``; temperature multiplies the spread.

        The entropy of a squashed Gaussian has no closed form: that of u plus the mean of log |da/du|, by Gauss-Hermite
        quadrature, which draws nothing and is differentiated like any other sum.
        """
        batch = observation.shape[:-1]
        head = self._head(parameters, observation)
        action = action.reshape(-1, *self.action_shape).T
        logp = self._log_prob(parameters, head, action, temperature).reshape(batch)
        if self.discrete:
            all_logp = jax.nn.log_softmax(head / temperature, axis=0)
            return logp, -jnp.sum(jnp.exp(all_logp) * all_logp, axis=0).reshape(batch)
        mean, log_std = self._gaussian(parameters, head)
        entropy = jnp.sum(log_std + math.log(temperature) + 0.5 + _HALF_LOG_2PI, axis=0)
        if self.squash:
            nodes, mass = (jnp.asarray(x, jnp.float32) for x in _NODES)
            slope = self._log_slope(mean[..., None] + temperature * jnp.exp(log_std)[..., None] * nodes)
            entropy = entropy + jnp.sum(slope @ mass, axis=0) / jnp.sum(mass)
        return logp, jnp.broadcast_to(entropy, logp.reshape(-1).shape).reshape(batch)

    def divergence(self, old: Parameters, new: Parameters, observation: jax.Array) -> jax.Array:
        """KL(old || new) in nats at each observation, ``[...]``; untempered. A squash does not change it."""
        was, now = (self._head(p, observation) for p in (old, new))
        if self.discrete:
            was, now = jax.nn.log_softmax(was, axis=0), jax.nn.log_softmax(now, axis=0)
            return jnp.sum(jnp.exp(was) * (was - now), axis=0).reshape(observation.shape[:-1])
        (was, was_std), (now, now_std) = self._gaussian(old, was), self._gaussian(new, now)
        spread = jnp.exp(2 * (was_std - now_std)) + ((was - now) * jnp.exp(-now_std)) ** 2
        return jnp.sum(now_std - was_std + (spread - 1) / 2, axis=0).reshape(observation.shape[:-1])

    def _log_prob(self, parameters: Parameters, head: jax.Array, action: jax.Array, temperature: float) -> jax.Array:
        """[B] from head [features, B] and action [B] or [A, B]."""
        if self.discrete:
            all_logp = jax.nn.log_softmax(head / temperature, axis=0)
            # A sum against the indicator vectorises where a gather would be a scalar loop.
            chosen = action == jnp.arange(self.action_count)[:, None]
            return jnp.sum(jnp.where(chosen, all_logp, 0.0), axis=0)
        mean, log_std = self._gaussian(parameters, head)
        log_std = log_std + math.log(temperature)
        z = (action - mean) * jnp.exp(-log_std)
        each = -0.5 * z**2 - log_std - _HALF_LOG_2PI
        return jnp.sum(each - self._log_slope(action) if self.squash else each, axis=0)


def policy_for(simulator: Simulator | World, critic: bool, **shape: Any) -> Policy:
    """The policy whose heads fit the simulator's observations and actions."""
    if shape.get("squash"):
        shape |= {"low": simulator.action_low, "high": simulator.action_high}
    return Policy(simulator.observation_size, simulator.action_count, simulator.action_size, critic, **shape)
