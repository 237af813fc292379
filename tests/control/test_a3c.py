"""A3C: gradients of two asynchronous workers around shared parameters, counted, saved and gone on with."""

import json
import os
import sys

import jax
import numpy as np
import pytest

from apportion.cli import main
from apportion.control import a3c
from apportion.control.a3c import Async, Worker, train_a3c
from apportion.control.engine import Engine
from apportion.control.hosts import world
from apportion.control.plan import TrainState
from apportion.control.train import prepare
from apportion.core.errors import ApportionError, InvalidMethod
from apportion.runs.files import CHECKPOINT, METRICS, SUMMARY, load_arrays

SMALL = {"setup.envs": 4, "setup.hidden": (8,), "sampler.horizon": 8}


def plan(task="CartPole-v1", steps=10_000, **overrides):
    return prepare("a2c", task, steps, SMALL | overrides)


# --- the parts, without Ray


@pytest.mark.parametrize("task", ["CartPole-v1", "InvertedPendulum-v5"])
def test_a_worker_hands_out_the_gradient_at_the_parameters_it_was_given(task):
    """That of the plain engine's own loss: one step of gradient descent is the same from both."""
    if task == "InvertedPendulum-v5":
        pytest.importorskip("mujoco")
    off = {"setup.normalise_observation": False, "setup.normalise_reward": False, "setup.stagger": False}
    engine = plan(task, **off)
    worker = Worker(engine, 3)
    flat = engine.init(0).parameters
    first, metrics = worker.gradient(flat, np.int32(0))
    np.testing.assert_allclose(np.linalg.norm(first), metrics.signals.grad_norm, rtol=1e-5)
    np.testing.assert_array_equal(worker._state.parameters, flat)
    twin = engine.init(3)._replace(parameters=flat)
    after, theirs = (jax.jit(engine.iterate) if isinstance(engine, Engine) else engine.iterate)(twin)
    np.testing.assert_allclose(theirs.signals.grad_norm, metrics.signals.grad_norm, rtol=1e-4)
    # Adam's first moment after one step is (1 - b1) times the (clipped) gradient.
    clipped = first * min(1, engine.method.update.max_grad_norm / np.linalg.norm(first))
    np.testing.assert_allclose(after.optimiser[1].mu / 0.1, clipped, atol=1e-5)
    second, _ = worker.gradient(flat, np.int32(0))
    assert not np.array_equal(first, second)


def test_updates_are_the_papers_rmsprop():
    engine = plan(**{"update.max_grad_norm": None, "update.anneal": "linear", "update.learning_rate": 0.01})
    alone = Async.__new__(Async)
    alone.engine = engine
    carry, worker = alone._first(0, 1), Worker(engine, 1)
    theta, g = np.asarray(carry.state.parameters, np.float64), 0.0
    for k in range(3):
        gradient, metrics = worker.gradient(carry.state.parameters, carry.state.env_steps)
        carry = alone._applied(carry, gradient, metrics)
        g = 0.99 * g + 0.01 * gradient.astype(np.float64) ** 2
        theta -= 0.01 * (1 - k * 32 / 10_000) * gradient / np.sqrt(g + a3c.EPSILON)
        np.testing.assert_allclose(carry.state.parameters, theta, atol=1e-5)
        assert carry.state.env_steps == 32 * (k + 1)
    assert isinstance(carry.state, TrainState)


@pytest.mark.filterwarnings("ignore:.*samples are reused")
@pytest.mark.parametrize(
    ("overrides", "workers", "message"),
    [
        ({"sampler.epochs": 2}, 2, "a3c on CartPole-v1: a segment gives one gradient"),
        ({"sampler.minibatches": 4}, 2, "a segment gives one gradient"),
        ({"sampler.start": "reset"}, 2, r"set sampler\.start='stream'"),
        ({}, 0, "workers is 0; it must be a whole number of 1 or more"),
        ({"setup.squash": True}, 2, "its actions are discrete"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(overrides, workers, message, tmp_path):
    pytest.importorskip("ray")
    with pytest.raises(ApportionError, match=message):
        train_a3c("CartPole-v1", 1_000, out=tmp_path / "run", workers=workers, overrides=overrides)
    assert not (tmp_path / "run").exists()


def test_normalisers_are_refused_by_name(tmp_path):
    pytest.importorskip("ray")
    pytest.importorskip("mujoco")
    with pytest.raises(InvalidMethod, match=r"share no statistics; set setup\.normalise_observation=False"):
        train_a3c("Hopper-v5", 1_000, out=tmp_path / "run")
    assert world("Hopper-v5").horizon == 1_000


def test_without_ray_and_without_a3c(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "a3c", "CartPole-v1"]) == 2
    error = capsys.readouterr().err
    assert "a3c runs on Ray" in error
    assert "pip install 'apportion[ray]'" in error
    assert error.count("\n") == 1
    assert main(["train", "a2c", "CartPole-v1", "--workers", "2"]) == 2
    assert "--workers is for a3c; a2c trains in one process" in capsys.readouterr().err


# --- two workers


@pytest.fixture(scope="module")
def ray(compilation_cache):
    ray = pytest.importorskip("ray")
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2, runtime_env=here)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_learn_cartpole_are_saved_and_go_on(ray, tmp_path):
    out, steps = tmp_path / "run", 30_000
    count = iter(range(1_000))
    given = {"out": out, "workers": 2, "quiet": True}
    stopped = train_a3c("CartPole-v1", steps, callbacks=[lambda row: next(count) < 40], **given)
    assert stopped["stopped"]
    _, about = load_arrays(out / CHECKPOINT)
    assert about["env_steps"] == 64 * about["iterations"] < steps
    summary = train_a3c("CartPole-v1", steps, resume=True, **given)
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    assert json.loads((out / SUMMARY).read_text()) == summary
    # Exactly as many steps as updates took, whoever they came from; both workers' updates arrived.
    assert summary["env_steps"] == 64 * summary["iterations"] == rows[-1]["env_steps"]
    assert steps <= summary["env_steps"] < steps + 64
    assert all(sum(r["arrived"]) == r["iteration"] for r in rows)
    assert min(rows[-1]["arrived"]) > 20
    assert (np.diff([r["arrived"] for r in rows], axis=0) >= 0).all()
    assert 0 < np.mean([r["staleness"] for r in rows]) <= 2
    assert {"kl", "entropy", "explained_variance", "return_mean"} <= set(rows[0])
    ended = [r["return_mean"] for r in rows if r["return_mean"] is not None]
    assert np.mean(ended[:5]) < 30
    assert np.mean(ended[-20:]) > 60
    with pytest.raises(ApportionError, match="workers is 2 there and 1 here"):
        train_a3c("CartPole-v1", steps, resume=True, **given | {"workers": 1})


@pytest.mark.slow
def test_a_worker_that_dies_is_told_in_one_line(ray):
    loop = Async(ray, plan(), 0, None, 1)
    try:
        assert loop.step(seconds=0.5) is not None
        ray.kill(loop._workers[0])
        with pytest.raises(ApportionError, match=r"a worker of a3c died \(.*--resume") as caught:
            [loop.step(seconds=0.1) for _ in range(1_000)]
        assert "\n" not in str(caught.value)
    finally:
        loop.close()
    assert ray.is_initialized()
