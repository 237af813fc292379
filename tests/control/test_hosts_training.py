"""Training on host simulators: every method, exact groups, bitwise resumption, normalisers, limits, breaks."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest

pytest.importorskip("mujoco")

import gymnasium
from worlds import FAMILY, small

from apportion import control
from apportion.control import Setup, checkpoint, host_engine, run
from apportion.control.evaluate import _STREAM
from apportion.control.host_engine import HostEngine
from apportion.control.hosts import TASKS, Step, world, world_of
from apportion.control.hosts.gym import GymHost
from apportion.control.hosts.mujoco import MujocoHost
from apportion.control.loop import Carry, Loop
from apportion.control.normalise import merged, nothing
from apportion.control.presets import resolve
from apportion.control.run import train_run
from apportion.control.train import prepare
from apportion.core.errors import ApportionError, ApportionWarning, InvalidMethod, UnknownName
from apportion.runs.files import CHECKPOINT, METRICS, POLICY, load_arrays

TASK = "InvertedPendulum-v5"
SETUP = Setup(envs=3, hidden=(8,), normalise_observation=True, normalise_reward=True)


def engine(name, task=TASK, horizon=12, setup=SETUP, steps=10_000, **changes):
    place = world(task) if isinstance(task, str) else task
    return HostEngine(small(name, horizon=horizon, **changes), place, setup, steps)


def spied(built, iterations=2):
    """States after each iteration (the first one included), and copies of the collections in between."""
    states, books = [built.init(0)], []
    for _ in range(iterations):
        states.append(built.iterate(states[-1])[0])
        books.append(jax.tree.map(np.copy, built.book))
    return states, books


# --- every method


@pytest.mark.parametrize("name", FAMILY)
def test_every_method_trains(name):
    built = engine(name)
    state = built.init(0)
    for _ in range(2):
        before = state
        state, metrics = built.iterate(state)
    assert np.isfinite(state.parameters).all()
    assert metrics.kept == 0 or not np.array_equal(state.parameters, before.parameters)
    assert state.iteration == 2
    assert state.normaliser.observation.size > 0


def test_the_return_that_is_reported_is_raw():
    """The pendulum earns 1 a step but for its fall, and its rewards are normalised by something else."""
    built = engine("dr_grpo")
    state, metrics = built.iterate(built.init(0))
    assert state.normaliser.reward.scale != 1
    assert metrics.finished.total == metrics.finished.length - built.book.terminated.sum()
    assert metrics.finished.episodes == 3 * 4


# --- groups


def test_siblings_share_one_start_state_exactly(monkeypatch):
    built, starts = engine("remax", group=2), []
    collect = host_engine.episodes

    def spy(host, *rest):
        starts.append(host.snapshot())
        return collect(host, *rest)

    monkeypatch.setattr(host_engine, "episodes", spy)
    states, (book, _) = spied(built)
    physics = starts[0][:, :-10].reshape(3, 3, -1)  # all but the random stream: three groups of two and a companion
    np.testing.assert_array_equal(physics, physics[:, :1].repeat(3, 1))
    assert len(np.unique(physics[:, 0], axis=0)) == 3
    assert not np.array_equal(starts[0], starts[1])
    action = book.action[0].reshape(3, 3)
    assert len(np.unique(action[:, :2])) == 6
    mode = built.policy.mode(built.parameters(states[0]), book.observation[0].reshape(3, 3, -1)[:, 2])
    np.testing.assert_allclose(action[:, 2:], mode, rtol=1e-6)


def test_only_live_rows_are_stepped():
    built = engine("dr_grpo", horizon=200)
    state, metrics = built.iterate(built.init(0))
    mask = built.book.mask
    assert len(set(mask.sum(0).tolist())) > 1
    np.testing.assert_array_equal(built.host.clock, mask.sum(0))
    assert state.env_steps == mask.sum() == metrics.finished.length


class Level(MujocoHost):
    """A pendulum whose first simulations, the first group, all earn the same."""

    def __init__(self, size):
        super().__init__(TASKS[TASK], size, 1)

    def step(self, actions, live=None):
        out = super().step(actions, live)
        return out._replace(reward=np.where(np.arange(self.size) < 3, self.clock == 1, out.reward))


def test_dynamic_sampling_draws_again_and_counts_every_step():
    """The first group never speaks, so every draw is made; the others stay as the first draw in which they spoke."""
    given = {"setup.envs": 3, "setup.hidden": (8,), "sampler.group": 3, "sampler.horizon": 30}
    one, three = (
        prepare("dapo", world_of(Level), 10_000, given | {"sampler.keep.max_batches": most}) for most in (1, 3)
    )
    (_, single), (single_book,) = spied(one, 1)
    (start, many), (book,) = spied(three, 1)
    metrics = three.iterate(start)[1]
    assert metrics.finished.episodes == 27
    assert metrics.finished.length == many.env_steps > 2 * single.env_steps
    spoke = np.repeat(one._speaks(), 3)
    assert not spoke[:3].any()
    assert spoke.any()
    np.testing.assert_array_equal(book.observation[:, spoke], single_book.observation[:, spoke])
    assert not np.array_equal(book.observation[:, :3], single_book.observation[:, :3])


def test_the_natural_gradient_trains():
    built = prepare("trpo", TASK, 10_000, {"setup.envs": 4, "setup.hidden": (8,), "sampler.horizon": 16})
    assert built.setup.normalise_observation
    states, _ = spied(built)
    assert np.isfinite(states[-1].parameters).all()
    assert not np.array_equal(states[-1].parameters, states[0].parameters)


# --- the normalisers


def test_moments_are_numpys_however_the_rows_are_cut():
    rows = np.random.default_rng(0).normal(50.0, [1.0, 1e-3, 100.0], (1_000, 3)).astype(np.float32)
    for cuts in ([], [1], [1, 2, 500], list(range(100, 1_000, 100))):
        moments = nothing((3,))
        for part in np.split(rows, cuts):
            moments = merged(moments, part)
        wide = rows.astype(np.float64)
        np.testing.assert_allclose(moments.mean, wide.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance, wide.var(0), rtol=1e-9)
    assert merged(moments, rows[:0]) is moments
    assert merged(nothing(), np.array([3.0])).scale == 1


@pytest.mark.parametrize(("name", "gamma"), [("a2c", 0.99), ("dr_grpo", 1.0)])
def test_statistics_are_those_of_the_stepped_rows(name, gamma):
    built = engine(name, horizon=30)
    states, books = spied(built)
    assert built.gamma == gamma
    seen = np.concatenate([b.observation[b.mask] for b in books]).astype(np.float64)
    found = states[-1].normaliser
    np.testing.assert_allclose(found.observation.mean, seen.mean(0), rtol=1e-10)
    np.testing.assert_allclose(found.observation.variance, seen.var(0), rtol=1e-10)
    assert found.observation.size == len(seen) == states[-1].env_steps
    returns, running = [], np.zeros(built.size)
    for book in books:
        for reward, mask, over in zip(book.reward, book.mask, book.terminated | book.truncated, strict=True):
            running = gamma * running + reward
            returns.extend(running[mask])
            running[over] = 0
        running = running if built.streams else np.zeros(built.size)
    np.testing.assert_allclose(found.reward.variance, np.var(returns), rtol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_first_ratio_is_one(name):
    """The statistics that a collection acted with are those of its update."""
    built = engine(name, epochs=1, minibatches=1, horizon=16)
    states, books = spied(built, 3)
    for state, book in zip(states, books, strict=False):
        logp, _ = built.policy.log_prob(built.networks(state), book.observation, book.action)
        np.testing.assert_allclose(np.exp(np.asarray(logp) - book.logq)[book.mask], 1, atol=1e-5)
    assert abs(built.iterate(states[-1])[1].signals.kl) < 1e-9


def test_observations_are_clipped():
    built = engine("a2c")
    networks = built.networks(built.init(0)) | {"observed": {"mean": np.ones(4), "scale": 100 * np.ones(4)}}
    np.testing.assert_array_equal(built.policy.observed(networks, np.array([0.0, 0.95, 1.01, 5])), [-10, -5, 1, 10])


# --- limits, bounds and broken simulations


class Short(MujocoHost):
    """A half-cheetah whose episodes last five steps."""

    def __init__(self, size):
        super().__init__(TASKS["HalfCheetah-v5"], size, 1)
        self.horizon = 5


class Breaking(Short):
    """Its second simulation breaks in its third step."""

    def step(self, actions, live=None):
        out = super().step(actions, live)
        bad = (np.arange(self.size) == 1) & (self.clock == 3)
        return Step(np.where(bad, 0, out.reward), out.terminated & ~bad, out.broken | bad)


def test_a_time_limit_bootstraps_from_the_true_last_observation():
    built = engine("a2c", world_of(Short))
    state = built.init(0)
    start = built.host.snapshot()
    _, metrics = built.iterate(state)
    book = built.book
    np.testing.assert_array_equal(np.flatnonzero(book.truncated.all(1)), [4, 9])
    assert not book.terminated.any()
    assert metrics.finished.episodes == 6
    assert metrics.finished.length == 30
    twin = Short(3)
    twin.restore(None, start)
    for t in range(5):
        twin.step(np.clip(book.action[t], -1, 1))
    np.testing.assert_array_equal(book.next_observation[4], twin.observe().astype(np.float32))
    value, next_value = built._values(built.parameters(state), book)
    theirs = built.policy.value(built.parameters(state), book.next_observation[4])
    np.testing.assert_allclose(next_value[4], theirs, rtol=1e-5)
    np.testing.assert_array_equal(next_value[5], value[6])
    assert abs(np.asarray(next_value[4] - value[5])).max() > 1e-3


def test_staggered_first_episodes_are_cut_and_not_reported():
    built = engine("a2c", world_of(Short), setup=Setup(envs=5, hidden=(8,), stagger=True))
    _, metrics = built.iterate(built.init(0))
    ends = [np.flatnonzero(column).tolist() for column in built.book.truncated.T]
    assert ends == [[4, 9], [3, 8], [2, 7], [1, 6, 11], [0, 5, 10]]
    assert metrics.finished.episodes == sum(map(len, ends)) - 4
    assert metrics.finished.length == 5 * metrics.finished.episodes


def test_actions_are_clipped_and_their_log_probability_is_not():
    built = engine("a2c", world_of(Short), setup=Setup(envs=3, hidden=(8,), log_std=1.0))
    seen, step = [], built.host.step
    built.host.step = lambda actions, *live: seen.append(np.copy(actions)) or step(actions, *live)
    _, (book,) = spied(built, 1)
    np.testing.assert_array_equal(np.stack(seen), np.clip(book.action, -1, 1))
    assert (abs(book.action) > 1).any()


@pytest.mark.parametrize("name", ["a2c", "dr_grpo"])
def test_a_broken_simulation_ends_its_own_episode(name):
    built = engine(name, world_of(Breaking), group=1 if name == "a2c" else 4)
    states, (book,) = spied(built, 1)
    assert not book.mask[2, 1]
    assert book.truncated[1, 1]
    assert np.isfinite(states[-1].parameters).all()
    if built.streams:
        np.testing.assert_array_equal(book.next_observation[1, 1], book.observation[2, 1])
        np.testing.assert_array_equal(book.mask[:, 1], [t % 3 != 2 for t in range(12)])
        assert book.mask[:, [0, 2]].all()
    else:
        assert book.mask.sum(0).tolist() == [5, 2] + [5] * 10


# --- resumed


def carried(loop):
    return checkpoint.named(loop.carry)


@pytest.mark.parametrize("task", [TASK, world_of(partial(GymHost, "CartPole-v1"))], ids=["mujoco", "gymnasium"])
@pytest.mark.parametrize("name", ["a2c", "dr_grpo"])
def test_a_loop_restored_in_another_engine_goes_on_bitwise(name, task, tmp_path):
    method, steps = small(name, horizon=12), 400
    whole = Loop(prepare(method, task, steps, setup=SETUP), 0)
    rows = []
    while not whole.done:
        rows += whole.step(seconds=0.0)
        if whole.iterations == 2:
            checkpoint.save(tmp_path / CHECKPOINT, whole.carry, {})
    arrays, _ = load_arrays(tmp_path / CHECKPOINT)
    assert all(x.dtype == np.float64 for k, x in arrays.items() if "stream" in k or "normaliser" in k)

    def restore(template: Carry) -> Carry:
        return checkpoint.restore(tmp_path / CHECKPOINT, arrays, template)

    again = Loop(prepare(method, task, steps, setup=SETUP), 0, restore)
    assert again.iterations == 2
    while not again.done:
        again.step(seconds=0.0)
    for (key, x), y in zip(carried(whole).items(), carried(again).values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=key)


SMALL = [("setup.envs", 4), ("setup.hidden", (8,)), ("sampler.horizon", 16), ("sampler.epochs", 2)]
GIVEN = {"method": "ppo", "task": "Hopper-v5", "steps": 8_000, "overrides": [*SMALL, ("sampler.minibatches", 2)]}
KILLED = """
import sys, jax
from apportion.control import run
jax.config.update("jax_disable_most_optimizations", True)
run.CHECKPOINT_SECONDS = 0.02
run.train_run(out=sys.argv[1], quiet=True, **{given!r})
"""


def test_killed_it_goes_on_bitwise(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED.format(given=GIVEN), str(tmp_path / "killed")])
    file, begun = tmp_path / "killed" / CHECKPOINT, time.monotonic()
    while not file.exists() and process.poll() is None and time.monotonic() - begun < 60:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run was over before it could be killed; make it longer"
    assert load_arrays(file)[1]["env_steps"] < 8_000
    undisturbed = train_run(out=tmp_path / "whole", quiet=True, **GIVEN)
    resumed = train_run(out=tmp_path / "killed", resume=True, quiet=True, **GIVEN)
    for name in (CHECKPOINT, METRICS, POLICY):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert resumed["return_mean"] == undisturbed["return_mean"] == run.evaluate_run(tmp_path / "whole")["return_mean"]
    (tmp_path / "whole" / POLICY).unlink()
    assert run.evaluate_run(tmp_path / "whole")["return_mean"] == undisturbed["return_mean"]
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["policy"]["normalise"]
    assert config["setup"]["normalise_reward"]


# --- evaluated


def test_evaluation_is_deterministic_and_gymnasiums_own():
    """`predict` on Gymnasium's environment, from the same starts, earns what the evaluation says."""
    trained = control.train(small("a2c", horizon=16), "Hopper-v5", 500, setup=SETUP, episodes=2)
    first, second = (trained.evaluate(episodes=2, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert trained.evaluate(episodes=2, seed=4).returns[0] != first.returns[0]
    assert np.isfinite(trained.evaluate(episodes=2, deterministic=False).returns).all()
    env = gymnasium.make("Hopper-v5")
    for episode, seed in enumerate(np.random.SeedSequence([3, _STREAM]).generate_state(2).tolist()):
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(trained.policy.predict(observation)[0])
            total, over = total + reward, terminated or truncated
        np.testing.assert_allclose(total, first.returns[episode], rtol=1e-3)


def test_several_seeds_are_several_runs():
    both = control.train(small("a2c", horizon=16), TASK, 96, seeds=[1, 2], setup=SETUP, episodes=1)
    alone = control.train(small("a2c", horizon=16), TASK, 96, seed=2, setup=SETUP, episodes=1)
    np.testing.assert_array_equal(both[1].parameters, alone.parameters)
    assert not np.array_equal(both[0].parameters, alone.parameters)


# --- any Gymnasium id


class Unrepeatable(gymnasium.Env):
    """Chance from outside, and a lock that no copy survives."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.handle = (i for i in ())

    def reset(self, *, seed=None, options=None):
        return np.random.default_rng().uniform(-1, 1, 1).astype(np.float32), {}

    def step(self, action):
        return self.reset()[0], float(action), False, False, {}


@pytest.fixture(scope="module")
def unrepeatable():
    gymnasium.register("Unrepeatable-v0", Unrepeatable, max_episode_steps=6)
    gymnasium.register("Endless-v0", Unrepeatable)


def test_a_gymnasium_environment_trains_and_says_what_it_lacks(unrepeatable, tmp_path):
    given = {"task": "Unrepeatable-v0", "overrides": [*SMALL[:3], ("sampler.minibatches", 1)], "quiet": True}
    with pytest.raises(InvalidMethod, match=r"cannot start from one state: the same seed .*copied"):
        train_run("grpo", out=tmp_path / "grpo", **given)
    train_run("a2c", out=tmp_path / "run", steps=128, **given)
    for name in (POLICY, "summary.json"):
        (tmp_path / "run" / name).unlink()
    with pytest.warns(ApportionWarning, match="cannot be saved in a file"):
        train_run("a2c", out=tmp_path / "run", steps=128, resume=True, **given)


def test_what_is_refused(unrepeatable):
    with pytest.raises(UnknownName, match="HalfCheetah-v5"):
        prepare("ppo", "HalfCheeta-v5")
    with pytest.raises(InvalidMethod, match=r"no time limit; set sampler\.horizon"):
        prepare("reinforce_togo", "Endless-v0")
    with pytest.raises(InvalidMethod, match=r"setup\.stagger is for simulators outside of jit"):
        prepare("ppo", "CartPole-v1", overrides=[("setup.stagger", True)])
    with pytest.raises(ApportionError, match="one seed"):
        Loop(prepare("ppo", TASK, 100), [0, 1])


def test_presets_normalise_the_mujoco_tasks_only():
    for name in TASKS:
        assert resolve("ppo", name).setup.normalise_observation
        assert resolve("grpo", name).setup.normalise_reward
    assert not resolve("ppo", "CartPole-v1").setup.normalise_observation
