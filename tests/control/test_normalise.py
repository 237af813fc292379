"""Normalisers inside jit: statistics of the stepped rows, seen by acting and learning alike, saved with the policy."""

import jax
import numpy as np
import pytest

from apportion import control
from apportion.control.collect import segment
from apportion.control.normalise import Normaliser, merged, merged_where, nothing, statistics
from apportion.control.run import evaluate_run, train_run
from apportion.control.train import prepare
from apportion.runs.files import POLICY, SUMMARY

ON = [("setup.normalise_observation", True), ("setup.normalise_reward", True), ("setup.hidden", (8,))]
TASK = "MountainCarContinuous-v0"


def engine(name, **more):
    overrides = [*ON, ("setup.envs", 4), *more.items()]
    return prepare(name, TASK, 10_000, overrides)


def test_masked_rows_do_not_count():
    rng = np.random.default_rng(0)
    moments, plain = nothing((3,), np.float32), nothing((3,))
    for size in (5, 1, 64):
        rows, valid = rng.normal(3.0, [1.0, 0.01, 10.0], (size, 3)).astype(np.float32), rng.random(size) < 0.5
        moments, plain = merged_where(moments, rows, valid), merged(plain, rows[valid])
    np.testing.assert_allclose(moments.mean, plain.mean, rtol=1e-5)
    np.testing.assert_allclose(moments.variance, plain.variance, rtol=1e-3)
    assert moments.size == plain.size
    none = merged_where(moments, rows, np.zeros(size, bool))
    assert all(np.array_equal(a, b) for a, b in zip(none, moments, strict=True))


def test_statistics_are_those_of_the_stepped_rows():
    built = engine("a2c", **{"sampler.horizon": 600, "credit.gamma": 0.9})
    state = built.init(0)
    rows, returns, running = [], [], np.zeros(4)
    for _ in range(2):
        _, collect, _ = jax.random.split(state.key, 3)
        parameters = built.parameters(state) | statistics(state.normaliser)
        _, book, _ = segment(built.simulator, built.policy, parameters, state.stream, collect, built.horizon)
        rows.append(np.asarray(book.observation, np.float64).reshape(-1, 2))
        for reward, over in zip(np.asarray(book.reward, np.float64), book.terminated | book.truncated, strict=True):
            running = 0.9 * running + reward
            returns.extend(running)
            running = np.where(over, 0, running)
        state, _ = jax.jit(built.iterate)(state)
    seen, reward = state.normaliser
    np.testing.assert_allclose(seen.mean, np.concatenate(rows).mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(seen.variance, np.concatenate(rows).var(0), rtol=1e-3)
    np.testing.assert_allclose(reward.variance, np.var(returns), rtol=1e-3)
    assert seen.size == reward.size == state.env_steps == 4_800


@pytest.mark.parametrize("name", ["ppo", "dr_grpo"])
def test_the_first_ratio_is_one(name):
    """The statistics that a collection acted with are those of its update."""
    built = engine(name, **{"sampler.epochs": 1, "sampler.minibatches": 1, "sampler.horizon": 50})
    iterate, state = jax.jit(built.iterate), built.init(0)
    for _ in range(3):
        state, metrics = iterate(state)
        assert abs(metrics.signals.kl) < 1e-9


def test_without_them_nothing_is_kept():
    assert prepare("ppo", "CartPole-v1").init(0).normaliser == Normaliser(None, None)


def test_many_seeds_in_one_program_are_each_seeds_own():
    given = {"overrides": ON, "steps": 4_096}
    many = control.train("a2c", TASK, seeds=[3, 4], **given)
    one = control.train("a2c", TASK, seed=4, **given)
    np.testing.assert_allclose(many[1].parameters, one.parameters, rtol=1e-4, atol=1e-5)
    assert many[1].networks["observed"]["mean"].shape == (2,)


def test_the_saved_policy_sees_through_them(tmp_path):
    out = tmp_path / "run"
    summary = train_run("a2c", TASK, 4_096, out=out, overrides=ON, quiet=True)
    again = evaluate_run(out)
    assert again["return_mean"] == summary["return_mean"]
    for name in (POLICY, SUMMARY):
        (out / name).unlink()
    assert evaluate_run(out)["return_mean"] == summary["return_mean"]
