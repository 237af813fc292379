"""Gaussian policies whose spread depends on the state, and those squashed to the task's bounds."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import small

from apportion import control
from apportion.control import Setup
from apportion.control.engine import Engine
from apportion.control.evaluate import evaluate_run
from apportion.control.host_engine import HostEngine
from apportion.control.hosts import world
from apportion.control.policy import LOG_STD_BOUNDS, Policy
from apportion.control.run import train_run
from apportion.control.simulators import simulator
from apportion.control.train import prepare
from apportion.core.errors import ApportionError

KINDS = list(itertools.product(["independent", "dependent"], [False, True]))
each_kind = pytest.mark.parametrize(("std", "squash"), KINDS, ids=lambda x: str(x))


def policy(std="independent", squash=True, low=(-1.0,), high=(1.0,), log_std=0.0):
    size = len(low)
    bounds = {"low": low, "high": high} if squash else {}
    return Policy(3, 0, size, critic=False, hidden=(8,), log_std=log_std, std=std, squash=squash, **bounds)


def with_head(made, mean, log_std=0.0):
    """Parameters under which every state has this mean; and this spread, if it is independent of the state."""
    parameters = jax.tree.map(jnp.zeros_like, made.init(jax.random.key(0)))
    bias = parameters["actor"][-1]["b"]
    parameters["actor"][-1]["b"] = bias.at[: made.action_size, 0].set(mean)
    if made.std == "independent":
        parameters["log_std"] = jnp.full(made.action_size, log_std)
    return parameters


def random(made, seed):
    """Parameters whose heads are far from their start."""
    parameters = made.init(jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed + 1_000), 20))
    return jax.tree.map(lambda x: x + 0.5 * jax.random.normal(next(keys), x.shape), parameters)


# --- the squash


@pytest.mark.parametrize(("u", "logp"), [(0.5, -0.8037095), (20.0, -162.3052329)])
def test_case_62_log_probability_of_a_squashed_action(u, logp):
    made, state = policy(), jnp.zeros(3)
    found, _ = made.log_prob(with_head(made, 0.0), state, jnp.array([u]))
    assert float(found) == pytest.approx(logp, rel=1e-6)
    if u == 0.5:
        assert float(made.applied(jnp.array([u]))[0]) == pytest.approx(0.4621172)
    scaled = policy(low=(-5.0, 0.0), high=(5.0, 4.0))
    both, _ = scaled.log_prob(with_head(scaled, 0.0), state, jnp.array([u, u]))
    assert float(both) == pytest.approx(2 * logp - np.log(5) - np.log(2), rel=1e-6)


@pytest.mark.parametrize("u", [-1e4, -300.0, -20.0, 20.0, 300.0, 1e4])
@pytest.mark.parametrize("std", ["independent", "dependent"])
def test_saturated_actions_have_finite_log_probabilities_and_gradients(u, std):
    made = policy(std)
    parameters, state = random(made, 0), jnp.ones(3)
    value, slope = jax.value_and_grad(lambda p: made.log_prob(p, state, jnp.array([u]))[0])(parameters)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, slope)))
    entropy = jax.grad(lambda p: made.log_prob(p, state, jnp.array([u]))[1])(parameters)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(entropy))
    assert abs(made.applied(jnp.array([u]))[0]) == 1


@settings(max_examples=25)
@given(st.floats(-2, 2), st.floats(-1.5, 0.7), st.sampled_from([(-1.0, 1.0), (-3.0, 5.0)]))
def test_densities_integrate_to_one_and_give_the_entropy(mean, log_std, bounds):
    """Over the actions themselves: da = (da/du) du, with the slope of `applied` and not the policy's own."""
    made = policy(low=bounds[:1], high=bounds[1:])
    u = np.linspace(mean - 9 * np.exp(log_std), mean + 9 * np.exp(log_std), 4_001, dtype=np.float32)
    logp, entropy = made.log_prob(with_head(made, mean, log_std), jnp.zeros((len(u), 3)), u[:, None])
    a = np.asarray(np.tanh(u.astype(np.float64)) * (bounds[1] - bounds[0]) / 2)
    density = np.exp(np.asarray(logp, np.float64))
    assert np.trapezoid(density, a) == pytest.approx(1, abs=1e-3)
    assert float(entropy[0]) == pytest.approx(-np.trapezoid(density * np.asarray(logp), a), abs=5e-3)


def test_it_is_torchs_transformed_distribution_where_that_is_exact():
    torch = pytest.importorskip("torch")
    from torch import distributions as d

    made = policy(low=(-2.0, 0.0), high=(2.0, 1.0))
    u = np.random.default_rng(0).uniform(-3, 3, (50, 2)).astype(np.float32)
    logp, _ = made.log_prob(with_head(made, 0.3, -0.4), jnp.zeros((50, 3)), u)
    normal = d.Normal(torch.full((2,), 0.3, dtype=torch.float64), float(np.exp(-0.4)))
    scale = d.AffineTransform(torch.tensor([0.0, 0.5]), torch.tensor([2.0, 0.5]))
    theirs = d.TransformedDistribution(normal, [d.TanhTransform(), scale])
    action = scale(torch.tanh(torch.as_tensor(u, dtype=torch.float64)))
    np.testing.assert_allclose(made.applied(jnp.asarray(u)), action, atol=1e-6)
    np.testing.assert_allclose(logp, theirs.log_prob(action).sum(-1), rtol=1e-4, atol=1e-4)


# --- the spread


@each_kind
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_probability_that_is_said(std, squash, temperature):
    made = policy(std, squash, low=(-2.0, 0.0), high=(2.0, 1.0))
    parameters, state = random(made, 1), jax.random.normal(jax.random.key(2), (6, 3))
    action, logq = made.sample(parameters, state, made.noise(jax.random.key(3), (6,)), temperature)
    logp, _ = made.log_prob(parameters, state, action, temperature)
    np.testing.assert_allclose(logq, logp, rtol=1e-6)
    for i in range(6):
        one, _ = made.log_prob(parameters, state[i], action[i], temperature)
        np.testing.assert_allclose(one, logp[i], rtol=1e-5, atol=1e-5)
    applied = made.applied(action)
    assert np.array_equal(applied, action) != squash


def test_a_dependent_spread_starts_as_told_depends_and_stays_in_its_bounds():
    made, state = policy("dependent", squash=False, log_std=-1.25), jax.random.normal(jax.random.key(0), (100, 3))

    def spread(parameters, state):
        return made._gaussian(parameters, made._head(parameters, state))[1]

    np.testing.assert_allclose(spread(made.init(jax.random.key(0)), state), -1.25, atol=0.05)
    far = jax.tree.map(lambda x: 100 * x, random(made, 3))
    found = spread(far, state)
    assert found.std() > 1
    assert LOG_STD_BOUNDS[0] <= found.min() < found.max() <= LOG_STD_BOUNDS[1]


@each_kind
def test_divergence_is_the_kl_integrated_numerically(std, squash):
    made = policy(std, squash)
    old, new, state = random(made, 5), random(made, 6), jnp.array([0.3, -0.2, 0.8])
    mean, log_std = (float(x[0, 0]) for x in made._gaussian(old, made._head(old, state)))
    u = np.linspace(mean - 9 * np.exp(log_std), mean + 9 * np.exp(log_std), 8_001, dtype=np.float32)
    logp = [np.asarray(made.log_prob(p, jnp.tile(state, (len(u), 1)), u[:, None])[0], np.float64) for p in (old, new)]
    z = (u.astype(np.float64) - mean) / np.exp(log_std)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) / np.exp(log_std)
    expected = np.trapezoid(density * (logp[0] - logp[1]), u)
    assert float(made.divergence(old, new, state)) == pytest.approx(expected, rel=1e-3)


# --- in training

SETUP = Setup(envs=4, hidden=(8,), std="dependent", squash=True)


@pytest.mark.parametrize("task", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_the_ratio_is_one_at_collection(task):
    engine = Engine(small("ppo", horizon=16, epochs=1, minibatches=1), simulator(task), SETUP, 1_000)
    state, metrics = jax.jit(engine.iterate)(engine.init(0))
    assert abs(metrics.signals.kl) < 1e-7  # of float32's rounding
    assert metrics.signals.clip_fraction == 0
    assert np.isfinite(state.parameters).all()


def test_on_the_host_the_stored_action_is_before_the_squash_and_the_task_gets_what_is_after():
    pytest.importorskip("mujoco")
    engine = HostEngine(small("a2c", horizon=16), world("HalfCheetah-v5"), SETUP, 1_000)
    seen, step = [], engine.host.step
    engine.host.step = lambda actions, *live: seen.append(np.copy(actions)) or step(actions, *live)
    state, _ = engine.iterate(engine.init(0))
    book = engine.book
    np.testing.assert_allclose(np.stack(seen), np.tanh(book.action), atol=1e-6)
    assert (abs(book.action) > 1).any()
    logp, _ = engine.policy.log_prob(engine.networks(engine.init(0)), book.observation, book.action)
    np.testing.assert_allclose(logp, book.logq, atol=1e-4)
    assert np.isfinite(state.parameters).all()


@pytest.mark.parametrize(("method", "task"), [("trpo", "Pendulum-v1"), ("dr_grpo", "Pendulum-v1")])
def test_trained_evaluated_acted_with_and_read_back(method, task, tmp_path):
    overrides = [("setup.envs", 4), ("setup.hidden", (8,)), ("setup.std", "dependent"), ("setup.squash", True)]
    overrides += [("sampler.horizon", 32), ("sampler.minibatches", 1)]
    summary = train_run(method, task, 1_000, out=tmp_path / "run", overrides=overrides, quiet=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["policy"]["low"], config["policy"]["high"]) == ([-2.0], [2.0])
    assert evaluate_run(tmp_path / "run")["return_mean"] == summary["return_mean"]
    run = control.train(method, task, 1_000, overrides=overrides)
    assert run.summary["return_mean"] == summary["return_mean"]
    wide = run.policy.predict(np.random.default_rng(0).normal(size=(200, 3)), deterministic=False)[0]
    assert np.abs(wide).max() <= 2
    assert len(np.unique(wide)) > 100
    head = run.engine.policy.mode(run.networks, jnp.ones((1, 3)))
    np.testing.assert_allclose(run.policy.predict(np.ones(3))[0], 2 * np.tanh(head[0]), rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("CartPole-v1", {"setup.squash": True}, r"CartPole-v1: its actions are discrete; leave setup\.std"),
        ("CartPole-v1", {"setup.std": "dependent"}, r"its actions are discrete"),
        ("Pendulum-v1", {"setup.std": "dependnt"}, r"unknown setup\.std 'dependnt'; did you mean 'dependent'"),
        ("Pendulum-v1", {"setup.squash": 1}, r"setup\.squash is 1; it must be True or False"),
        (
            "Pendulum-v1",
            {"setup.log_std": 2.0, "setup.std": "dependent"},
            r"log_std is 2\.0; .*between -5 and 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(task, overrides, message):
    with pytest.raises(ApportionError, match=message):
        prepare("ppo", task, overrides=overrides)


def test_an_unbounded_action_space_has_nothing_to_squash_to():
    import dataclasses

    endless = dataclasses.replace(simulator("Pendulum-v1"), action_low=(-np.inf,), action_high=(np.inf,))
    with pytest.raises(ApportionError, match=r"no finite bounds to squash them to; set setup\.squash=False"):
        Engine(small("ppo", horizon=16), endless, SETUP, 1_000)
