"""The same parity through JAX's autodiff, with our weights computed on JAX arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.core import catalogue as c
from apportion.core.weigh import advantages, weights
from core.books import for_method, rollouts


def group_advantage(book):
    R = book["reward"].sum(-1, keepdims=True)
    return (R - R.mean(1, keepdims=True)) / (R.std(1, keepdims=True) + 1e-6)


def clipped(ratio, A, low, high):
    return jnp.minimum(ratio * A, jnp.clip(ratio, 1 - low, 1 + high) * A)


def grpo(logp, book):
    A, mask = group_advantage(book), book["mask"]
    delta = jnp.where(mask, book["logref"] - logp, 0.0)
    objective = clipped(jnp.exp(jnp.where(mask, logp - book["logq"], 0.0)), A, 0.2, 0.2)
    return -((mask * (objective - 0.04 * (jnp.exp(delta) - 1 - delta))).sum(-1) / mask.sum(-1)).mean()


def gspo(logp, book):
    mask = book["mask"]
    s = jnp.exp(jnp.where(mask, logp - book["logq"], 0.0).sum(-1, keepdims=True) / mask.sum(-1, keepdims=True))
    return -clipped(s, group_advantage(book), 3e-4, 4e-4).mean()


def cispo(logp, book):
    mask = book["mask"]
    ratio = jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.where(mask, logp - book["logq"], 0.0)), 5.0))
    return -(mask * ratio * group_advantage(book) * logp).sum() / mask.sum()


def dpo(logp, book):
    h = jnp.where(book["mask"], logp - book["logref"], 0.0).sum(-1)
    sign = jnp.where(book["reward"].sum(-1) > 0, 1.0, -1.0)
    return -jax.nn.log_sigmoid(0.1 * (sign * h).sum(-1)).mean()


@pytest.mark.parametrize(
    ("method", "surrogate"), [(c.grpo, grpo), (c.gspo, gspo), (c.cispo, cispo), (c.dpo, dpo)], ids=lambda x: str(x)[:0]
)
def test_weights_are_the_gradient_that_jax_finds(method, surrogate):
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(surrogate))
        for seed in range(8):
            book = for_method(method, seed, spread=6e-4 if method is c.gspo else 0.5)
            book = {k: v if v is None or k == "horizon" else jnp.asarray(v) for k, v in book.items()}
            ours = -weights(method, advantages(method, rollouts(book)), book["logp"]).w
            arrays = {k: v for k, v in book.items() if k in ("reward", "mask", "logq", "logref")}
            np.testing.assert_allclose(ours, gradient(book["logp"], arrays), rtol=1e-9, atol=1e-9)
