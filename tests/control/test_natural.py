"""TRPO's step: inside its region, uphill, and still where there is nothing to follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion import methods
from apportion.control import Engine, Setup, simulator
from apportion.control.natural import conjugate_gradient, natural_step
from apportion.core.errors import InvalidMethod


def test_case_65_step_fills_the_region_exactly():
    """g = [3, 4], F = I, delta = 0.01: the step is sqrt(2 delta / 25) g and its quadratic KL is delta."""
    step = natural_step(jnp.array([3.0, 4.0]), lambda v: v, 0.01, 10)
    np.testing.assert_allclose(step, [0.0848528, 0.1131371], atol=1e-7)
    assert float(step @ step) / 2 == pytest.approx(0.01, rel=1e-5)


def test_case_65_no_gradient_no_step():
    np.testing.assert_array_equal(natural_step(jnp.zeros(2), lambda v: v, 0.01, 10), [0.0, 0.0])


def test_case_65_negative_curvature_is_refused():
    np.testing.assert_array_equal(natural_step(jnp.array([3.0, 4.0]), lambda v: -v, 0.01, 10), [0.0, 0.0])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_conjugate_gradient_solves_in_as_many_turns_as_dimensions(size):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size))
    matrix, target = root @ root.T + np.eye(size), rng.normal(size=size)
    solved = conjugate_gradient(
        lambda v: jnp.asarray(matrix, jnp.float32) @ v, jnp.asarray(target, jnp.float32), size + 2
    )
    np.testing.assert_allclose(solved, np.linalg.solve(matrix, target), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_an_update_stays_in_its_region_and_moves(task):
    method = methods.trpo.replace(sampler=methods.trpo.sampler.replace(horizon=32, minibatches=4))
    engine = Engine(method, simulator(task), Setup(envs=4, hidden=(8,)), 1_000)
    before = engine.init(0)
    after, metrics = jax.jit(engine.iterate)(before)
    actor = engine.parameters(before)["actor"], engine.parameters(after)["actor"]
    assert 0 < float(metrics.signals.kl) <= method.update.delta
    assert not np.array_equal(actor[0][0]["w"], actor[1][0]["w"])
    assert np.all(np.isfinite(after.parameters))


def test_divergence_is_the_kl_of_the_two_distributions():
    engine = Engine(methods.trpo, simulator("CartPole-v1"), Setup(envs=4), 1_000_000)
    old, new = (engine.policy.init(jax.random.key(k)) for k in (0, 1))
    seen = jax.random.normal(jax.random.key(2), (5, 4))
    logp = [np.stack([engine.policy.log_prob(p, seen, jnp.full(5, a))[0] for a in (0, 1)]) for p in (old, new)]
    expected = np.sum(np.exp(logp[0]) * (logp[0] - logp[1]), axis=0)
    np.testing.assert_allclose(engine.policy.divergence(old, new, seen), expected, atol=1e-6)
    np.testing.assert_allclose(engine.policy.divergence(old, old, seen), 0, atol=1e-7)


def test_an_entropy_bonus_has_no_place_in_the_region():
    with pytest.raises(InvalidMethod, match="entropy"):
        Engine(methods.trpo.replace(entropy=0.01), simulator("CartPole-v1"), Setup(), 1_000_000)
