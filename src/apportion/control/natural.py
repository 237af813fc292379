"""TRPO's step: the natural gradient scaled to the KL region, then a backtracking line search; the critic by itself.

Source: Schulman et al. 2015 (TRPO), section 6 and appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apportion.control.learn import Learner, Rows, Signals, as_ledger
from apportion.core.update import NaturalGradient
from apportion.core.weigh import weights

Product = Callable[[jax.Array], jax.Array]


def conjugate_gradient(product: Product, target: jax.Array, iterations: int) -> jax.Array:
    """Approximate solution x of product(x) = target, [P]; stops moving once solved."""

    def turn(_: int, at: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, residual, direction = at
        image = product(direction)
        size, curvature = residual @ residual, direction @ image
        open_ = (size > 1e-20) & (curvature > 0)
        step = jnp.where(open_, size / jnp.where(open_, curvature, 1.0), 0.0)
        following = residual - step * image
        turned = following + jnp.where(open_, (following @ following) / jnp.where(open_, size, 1.0), 0.0) * direction
        return x + step * direction, following, turned

    return jax.lax.fori_loop(0, iterations, turn, (jnp.zeros_like(target), target, target))[0]


def natural_step(ascent: jax.Array, product: Product, delta: float, iterations: int) -> jax.Array:
    """The step along F⁻¹g whose quadratic KL is delta, [P]; 0 without gradient or where curvature is not positive.

    >>> natural_step(jnp.array([3.0, 4.0]), lambda v: v, 0.01, 10).round(7)
    Array([0.0848528, 0.1131371], dtype=float32)
    """
    direction = conjugate_gradient(product, ascent, iterations)
    quadratic = direction @ product(direction)
    fits = (quadratic > 0) & jnp.isfinite(quadratic)
    return jnp.where(fits, jnp.sqrt(2 * delta / jnp.where(fits, quadratic, 1.0)), 0.0) * direction


def natural_update(
    learner: Learner, flat: jax.Array, state: Any, rows: Rows, key: jax.Array
) -> tuple[jax.Array, Any, Signals]:
    """One policy step inside the region over all rows, then the critic's epochs of regression."""
    update, loss = learner.method.update, learner.method.value_loss
    assert isinstance(update, NaturalGradient)
    assert loss is not None
    temperature = learner.method.sampler.temperature

    def log_prob(at: jax.Array) -> jax.Array:
        return learner.policy.log_prob(learner.unravel(at), rows.observation, rows.action, temperature)[0]

    def gain(at: jax.Array) -> jax.Array:
        """The surrogate sum(share · ratio · A); its gradient at the sampler is sum(w · grad log pi)."""
        logp = log_prob(at)
        ledger = weights(learner.method, as_ledger(rows), jax.lax.stop_gradient(logp))
        assert ledger.w is not None
        return jnp.sum(jax.lax.stop_gradient(ledger.w) * logp)

    def surrogate(at: jax.Array) -> jax.Array:
        return jnp.sum(rows.share * rows.advantage * jnp.exp(log_prob(at) - rows.logq))

    def divergence(at: jax.Array) -> jax.Array:
        """Mean KL from the sampler's distribution, over the states visited."""
        return learner.policy.divergence(learner.unravel(flat), learner.unravel(at), rows.observation) @ rows.weight

    def product(v: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(divergence), (flat,), (v,))[1] + update.damping * v

    step = natural_step(jax.grad(gain)(flat), product, update.delta, update.iterations)
    start = surrogate(flat)

    def fails(at: jax.Array) -> jax.Array:
        return (divergence(at) > update.delta) | (surrogate(at) <= start) | ~jnp.all(jnp.isfinite(at))

    def shrink(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return at[0] + 1, flat + update.shrink ** (at[0] + 1.0) * step

    def looking(at: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (at[0] < update.backtracks) & fails(at[1])

    found = jax.lax.while_loop(looking, shrink, (jnp.zeros(()), flat + step))[1]
    moved = jnp.where(fails(found), flat, found)
    # Rows without share leave only the critic's loss: the same epochs of minibatches, at the critic's own rate.
    critic_only = rows._replace(share=jnp.zeros_like(rows.share))
    rate = jnp.asarray(1e-3 if loss.learning_rate is None else loss.learning_rate)
    fitted, state, signals = learner.even(moved, state, critic_only, key, rate)
    return fitted, state, signals._replace(kl=divergence(moved), grad_norm=jnp.sqrt(jnp.sum(step**2)))
