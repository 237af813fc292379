"""The interface in Python: runs, many seeds in one program, policies to act with, evaluation, the cache."""

import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import FAMILY, small

from apportion import control, methods
from apportion.control import cache, checkpoint
from apportion.control.evaluate import interval
from apportion.control.learn import Learner, optimiser
from apportion.control.loop import Loop, number
from apportion.control.train import prepare
from apportion.core.errors import ApportionError, ApportionWarning, InvalidMethod, UnknownName
from apportion.core.update import Adam
from apportion.runs.files import load_arrays

SETUP = control.Setup(envs=4, hidden=(8,))


@pytest.fixture(scope="module")
def cartpole():
    """PPO as anybody would first run it."""
    return control.train(methods.ppo, "CartPole-v1", steps=150_000, seed=0)


@pytest.fixture(scope="module")
def pendulum():
    return control.train(small("a2c"), "Pendulum-v1", steps=1_000, setup=SETUP)


# --- a run


@pytest.mark.slow
def test_ppo_solves_cartpole_and_gymnasium_agrees(cartpole):
    """The policy is scored by our simulator and once more by Gymnasium's own environment."""
    assert cartpole.summary["return_mean"] >= 475
    env = gymnasium.make("CartPole-v1")
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            action, state = cartpole.policy.predict(observation)
            assert state is None
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        assert total >= 475


@pytest.mark.slow
def test_what_a_run_tells(cartpole):
    summary, rows = cartpole.summary, cartpole.metrics
    assert summary["env_steps"] == rows[-1]["env_steps"] >= 150_000
    assert summary["episodes"] == 20
    assert summary["return_ci"][0] <= summary["return_mean"] <= summary["return_ci"][1]
    assert summary["steps_per_second"] > 0
    assert 100 < len(rows) <= 201
    assert rows[0]["return_mean"] < 60 < rows[-1]["return_mean"]
    assert all(r["entropy"] > 0 and r["kept"] == 1.0 for r in rows)
    again = cartpole.evaluate(episodes=20, seed=0)
    assert again.returns.mean() == pytest.approx(summary["return_mean"])
    assert len(cartpole.evaluate(episodes=3).lengths) == 3


@pytest.mark.slow
def test_predict_single_and_batched(cartpole, pendulum):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=5, vectorization_mode="sync")
    observations, _ = envs.reset(seed=0)
    actions, _ = cartpole.policy.predict(observations)
    assert actions.shape == (5,)
    assert actions.dtype == np.int64
    assert [int(cartpole.policy.predict(o)[0]) for o in observations] == actions.tolist()
    envs.step(actions)
    env = gymnasium.make("Pendulum-v1")
    observation, _ = env.reset(seed=0)
    action, _ = pendulum.policy.predict(observation)
    assert action.shape == (1,)
    assert env.action_space.contains(action)
    wide, _ = pendulum.policy.predict(np.repeat(observation[None], 500, 0), deterministic=False)
    assert wide.shape == (500, 1)
    assert len(np.unique(wide)) > 300
    assert np.abs(wide).max() <= 2.0  # clipped to the task's bounds


@pytest.mark.slow
def test_predict_draws_anew_each_time_and_refuses_other_shapes(pendulum):
    observation = np.array([1.0, 0.0, 0.0])
    first, second = (pendulum.policy.predict(observation, deterministic=False)[0] for _ in range(2))
    assert first != second
    assert pendulum.policy.predict(observation)[0] == pendulum.policy.predict(observation.tolist())[0]
    for bad in (np.zeros(4), np.zeros((2, 2, 3)), 0.0):
        with pytest.raises(ApportionError, match=r"observation has shape .*Pendulum-v1 has \[3\] or \[B, 3\]"):
            pendulum.policy.predict(bad)


# --- many seeds in one program


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("ppo", 640), ("dr_grpo", 1_500)], ids=["stream", "episodes"])
def test_many_seeds_equal_single_runs(name, steps):
    """Of whole episodes each seed takes another number of steps: those that have enough wait for the others."""
    method = small(name, horizon=16 if name == "ppo" else 60)
    together = control.train(method, "CartPole-v1", steps=steps, seeds=[0, 1, 2], setup=SETUP)
    for run, seed in ((together[0], 0), (together[2], 2)):
        alone = control.train(method, "CartPole-v1", steps=steps, seed=seed, setup=SETUP)
        assert run.seed == alone.seed == seed
        assert [r["env_steps"] for r in run.metrics] == [r["env_steps"] for r in alone.metrics]
        assert run.summary["iterations"] == alone.summary["iterations"]
        for key in ("return_mean", "entropy", "grad_norm"):
            ours, theirs = ([r[key] or 0.0 for r in one.metrics] for one in (run, alone))
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5, err_msg=key)
        np.testing.assert_allclose(run.parameters, alone.parameters, atol=1e-4)
    if name == "dr_grpo":
        assert len({run.summary["env_steps"] for run in together}) > 1
    assert len({run.parameters.tobytes() for run in together}) == 3


# --- the family


@pytest.mark.slow
@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("name", FAMILY)
def test_every_method_trains(name, task):
    family(name, task)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0"])
@pytest.mark.parametrize("name", ["ppo", "dr_grpo"])
def test_every_task_trains(name, task):
    family(name, task)


def family(name, task):
    method = small(name, horizon=16)
    engine = control.Engine(method, control.simulator(task), SETUP, 10_000)
    state, step = jax.jit(engine.init)(np.uint32(0)), jax.jit(engine.iterate)
    begun = state.parameters
    for _ in range(3):
        before = state
        state, metrics = step(state)
        assert bool(jnp.isfinite(state.parameters).all())
        assert all(bool(jnp.isfinite(x)) for x in metrics.signals)
        assert int(state.env_steps) > int(before.env_steps)
    assert int(state.iteration) == 3
    # Where no sibling arrives in time, all returns are equal: nothing can be learned, and nothing moves.
    silent = name == "dr_grpo" and task in ("Acrobot-v1", "MountainCar-v0")
    assert bool(jnp.any(state.parameters != begun)) != silent


def test_a_sequence_ratio_over_long_episodes_is_doubted():
    with pytest.warns(ApportionWarning, match="over up to 500 decisions degenerates"):
        prepare("gspo", "CartPole-v1")


def test_what_control_cannot_run_is_refused():
    with pytest.raises(InvalidMethod, match="control"):
        prepare(methods.dpo, "CartPole-v1")
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        prepare("grpoo", "CartPole-v1")
    with pytest.raises(UnknownName, match="did you mean 'envs'"):
        prepare("ppo", "CartPole-v1", overrides={"setup.env": 2})
    with pytest.raises(ApportionError, match="seeds is empty"):
        control.train("ppo", "CartPole-v1", seeds=[])
    with pytest.raises(ApportionError, match=r"seed is 1\.5"):
        control.train("ppo", "CartPole-v1", seed=1.5)
    with pytest.raises(ApportionError, match="episodes is 0"):
        control.evaluate_policy(control.simulator("CartPole-v1"), None, None, episodes=0)


# --- exactness


def test_optimiser_goes_on_where_it_was_saved(tmp_path):
    """Case 70: Adam of rate 0.1 from 0, gradients 1 then -1 with a save between; a fresh optimiser would end at 0."""
    method = methods.reinforce.replace(update=Adam(0.1))
    learner = Learner(method, None, None)
    theta, state = jnp.zeros(1), optimiser(method.update).init(jnp.zeros(1))
    theta, state = learner.step(theta, state, jnp.ones(1), jnp.float32(0.1))
    path = tmp_path / "adam.safetensors"
    checkpoint.save(path, (theta, state), {})
    arrays, _ = load_arrays(path)
    theta, state = checkpoint.restore(path, arrays, jax.eval_shape(lambda: (theta, state)))
    theta, _ = learner.step(theta, state, -jnp.ones(1), jnp.float32(0.1))
    assert float(theta[0]) == pytest.approx(-0.0947368, abs=1e-6)
    fresh, _ = learner.step(jnp.full(1, -0.1), optimiser(method.update).init(theta), -jnp.ones(1), jnp.float32(0.1))
    assert float(fresh[0]) == pytest.approx(0.0, abs=1e-6)


def test_checkpoints_keep_every_dtype(tmp_path):
    tree = {
        "b": np.array([True, False]),
        "i": np.int32(7),
        "u": np.array([[2**32 - 1]], np.uint32),
        "f": np.array([np.nan, -0.0, 1e-45], np.float32),
        "empty": np.zeros((3, 0), np.float32),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    checkpoint.save(tmp_path / "x", tree, {"rows": 3, "task": "t"})
    arrays, about = load_arrays(tmp_path / "x")
    assert about == {"format": 1, "rows": 3, "task": "t"}
    for name, x in tree.items():
        assert arrays[name].dtype == np.asarray(x).dtype
        assert arrays[name].shape == np.shape(x)
        assert arrays[name].tobytes() == np.asarray(x).tobytes()
    first = (tmp_path / "x").read_bytes()
    checkpoint.save(tmp_path / "x", dict(reversed(tree.items())), {"task": "t", "rows": 3})
    assert (tmp_path / "x").read_bytes() == first


def test_flat_parameters_are_the_networks(pendulum):
    engine = pendulum.engine
    ours = checkpoint.unflatten(engine.policy, pendulum.parameters)
    theirs = engine.learner.unravel(jnp.asarray(pendulum.parameters))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), ours, theirs))


@pytest.mark.slow
def test_a_loop_is_iterate_and_nothing_else():
    engine = prepare(small("a2c", horizon=8), "CartPole-v1", 320, setup=SETUP)
    loop = Loop(engine, 3)
    while not loop.done:
        loop.step(seconds=0.0)
    state, step = jax.jit(engine.init)(np.uint32(3)), jax.jit(engine.iterate)
    for _ in range(10):
        state, _ = step(state)
    # Two programs: XLA may fuse, and so round, them apart.
    np.testing.assert_allclose(loop.carry.state.parameters, state.parameters, atol=1e-5)
    assert np.array_equal(loop.carry.state.key, jax.random.key_data(state.key))


def test_evaluation_leaves_out_nothing_and_counts_what_it_should():
    """Random play on MountainCar never arrives: each of its episodes lasts 200 decisions of reward -1."""
    engine = prepare(small("a2c"), "MountainCar-v0", 100, setup=SETUP)
    flat = jax.jit(engine.init)(np.uint32(0)).parameters
    result = control.evaluate(engine, flat, episodes=4, deterministic=False)
    assert result.returns.tolist() == [-200.0] * 4
    assert result.lengths.tolist() == [200] * 4
    assert result.summary()["return_ci"] == [-200.0, -200.0]


def test_interval_of_one_episode():
    assert interval(np.array([3.0])) == [3.0, 3.0]


@pytest.mark.parametrize(("x", "wanted"), [(0.1, 0.1), (np.nan, None), (np.inf, None), (1 / 3, 0.33333334)])
def test_numbers_in_the_log_are_short_and_finite(x, wanted):
    assert number(np.float32(x)) == wanted


# --- the cache of compiled programs


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("APPORTION_CACHE", "off")
    assert cache.folder() is None
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))
    assert cache.folder() == tmp_path
    monkeypatch.delenv("APPORTION_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache.folder() == tmp_path / "x" / "apportion" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder().parts[-3:] == (".cache", "apportion", "xla")


CACHED = """
import jax, sys
from apportion.control import cache
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)
jax.jit(lambda x: x - 2)(1.0)  # JAX has decided that there is no cache
print(cache.enable())
jax.jit(lambda x: x + 1)(1.0)
print(len(hits))
"""


@pytest.mark.slow
def test_programs_are_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "kept"))
    lines = [
        subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert lines == [[str(tmp_path / "kept"), "0"], [str(tmp_path / "kept"), "1"]]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path / "file" / "x"))  # cannot be made: go on without
    done = subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "0"]
