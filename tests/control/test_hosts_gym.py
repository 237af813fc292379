"""The Gymnasium host: its numbers, no fake resets, groups and snapshots where the environment allows them."""

import threading

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apportion.control.hosts import NO_LIMIT, host
from apportion.control.hosts.gym import GymHost
from apportion.core.errors import ApportionError, InvalidData, UnknownName

BOX = "Pendulum-v1"


class Walk(gymnasium.Env):
    """A random walk; subclasses take something away. Discrete actions 1..3, a 2 by 1 observation."""

    observation_space = spaces.Box(-np.inf, np.inf, (2, 1), np.float64)
    action_space = spaces.Discrete(3, start=1)
    limit = 5.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.count = self.chance().standard_normal(), 0
        return self.seen(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place += (action - 2) + self.chance().standard_normal()
        self.count += 1
        return self.seen(), -abs(self.place), bool(abs(self.place) > self.limit), self.count == 7, {}

    def chance(self):
        return self.np_random

    def seen(self):
        return np.array([[self.place], [self.count]])


class Unseeded(Walk):
    def __init__(self):
        self.own = np.random.default_rng()

    def chance(self):
        return self.own


class Locked(Walk):
    """Holds what cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()


class Hopeless(Unseeded):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Offering(Locked):
    """Cannot be copied, and offers its state."""

    def get_state(self):
        return self.place, self.count

    def set_state(self, state):
        self.place, self.count = state


class Lying(Locked):
    """Offers a state that is not all of it."""

    def get_state(self):
        return self.place

    def set_state(self, state):
        self.place = state


class Fragile(Walk):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return (seen * np.nan if action == 3 else seen), reward, *rest


class Words(Walk):
    observation_space = spaces.Discrete(4)


class Switches(Walk):
    action_space = spaces.MultiBinary(2)


class Choices(Walk):
    action_space = spaces.MultiDiscrete([2, 3])


class Parts(Walk):
    action_space = spaces.Dict(arm=spaces.Box(-1, 1, (2,)), grip=spaces.Discrete(2))


class Pair(Walk):
    action_space = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(2)))


class Counts(Walk):
    action_space = spaces.Box(0, 3, (2,), np.int32)


class Idle(Walk):
    action_space = spaces.Box(-1, 1, (0,))


class Blind(Walk):
    observation_space = spaces.Box(-1, 1, (0,))


class Views(Walk):
    observation_space = spaces.Dict(camera=spaces.Box(0, 1, (4, 4)), joints=spaces.Box(-1, 1, (2,)))


class Both(Walk):
    observation_space = spaces.Tuple((spaces.Box(0, 1, (2,)), spaces.Discrete(2)))


class NoFile(Walk):
    def __init__(self):
        pytest.importorskip("mujoco").MjModel.from_xml_path("there_is_no_such_robot.xml")


class BadFile(Walk):
    def __init__(self):
        pytest.importorskip("mujoco").MjModel.from_xml_string("<mujoco><robot/></mujoco>")


class Missing(Walk):
    def __init__(self):
        raise gymnasium.error.DependencyNotInstalled("box3d is not installed")


@pytest.fixture(autouse=True)
def registered():
    kinds = (Walk, Unseeded, Locked, Hopeless, Offering, Lying, Fragile, Words, Switches, Choices, Parts, Pair, Counts)
    kinds += (Idle, Blind, Views, Both, NoFile, BadFile, Missing)
    for kind in kinds:
        gymnasium.register(f"Test{kind.__name__}-v0", kind)
    yield
    for kind in kinds:
        del gymnasium.registry[f"Test{kind.__name__}-v0"]


def actions_of(sim, rng):
    if sim.action_count:
        return rng.integers(sim.action_count, size=sim.size)
    return 1.5 * rng.uniform(sim.action_low, sim.action_high, (sim.size, sim.action_size))


def play(sim, seed, steps):
    """Everything seen; whatever ends starts anew."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        reward, terminated, broken = sim.step(actions_of(sim, rng))
        done = terminated | broken | sim.truncated()
        seen.append(np.column_stack([sim.observe(), reward, terminated, broken, sim.truncated()]))
        sim.reset(done)
        seen.append(sim.observe())
    return seen


def assert_same_seen(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("id", ["CartPole-v1", BOX, "MountainCarContinuous-v0"])
def test_every_step_equals_gymnasium(id):
    sim, env = host(id, 2), gymnasium.make(id)
    assert isinstance(sim, GymHost)
    assert sim.horizon == env.spec.max_episode_steps
    observation, _ = env.reset(seed=8)
    sim.reset(seeds=7)
    rng = np.random.default_rng(0)
    for _ in range(600):
        np.testing.assert_array_equal(sim.observe()[1], observation)
        actions = actions_of(sim, rng)
        given = actions[1] if sim.action_count else actions[1].astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(given)
        step = sim.step(actions, [1])
        np.testing.assert_array_equal(sim.observe()[1], observation)
        assert (step.reward[1], step.terminated[1], sim.truncated()[1]) == (reward, terminated, truncated)
        assert step.reward[0] == 0
        if terminated or truncated:
            observation, _ = env.reset()
            sim.reset([1])


def test_the_description():
    sim = host("CartPole-v1", 3)
    assert (sim.action_count, sim.action_size, sim.action_low, sim.observation_size) == (2, 0, (), 4)
    sim = host(BOX, 3)
    assert (sim.action_count, sim.action_size, sim.action_low, sim.action_high) == (0, 1, (-2.0,), (2.0,))
    assert sim.observe().dtype == np.float32
    walk = host("TestWalk-v0", 1)
    assert (walk.observation_size, walk.horizon, walk.observe().dtype) == (2, NO_LIMIT, np.float64)


def test_no_fake_reset_step_exists():
    """Case 60: next-step autoreset makes a step whose action is ignored; the host's transitions are the others."""
    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode.NEXT_STEP)
    sim = host("CartPole-v1", 1)
    observation, _ = vector.reset(seed=3)
    sim.reset(seeds=3)
    done, fakes, real = False, 0, 0
    for _ in range(200):
        action = np.array([1])
        observation, reward, terminated, truncated, _ = vector.step(action)
        if done:
            fakes += 1
            assert reward[0] == 0
            sim.reset()
        else:
            real += 1
            step = sim.step(action)
            assert (step.reward[0], step.terminated[0]) == (reward[0], terminated[0])
        np.testing.assert_array_equal(sim.observe(), observation)
        done = bool(terminated[0] or truncated[0])
    assert fakes > 10
    assert real + fakes == 200


def test_the_last_observation_is_the_true_one():
    """Same-step autoreset would show the next episode's first."""
    sim = host("CartPole-v1", 1)
    sim.reset(seeds=0)
    while not sim.step([1]).terminated[0]:
        pass
    assert abs(sim.observe()[0, 2]) > 0.2


@pytest.mark.parametrize("id", ["CartPole-v1", BOX, "TestWalk-v0"])
def test_seeds(id):
    """Case 68."""
    sim = host(id, 3)
    sim.reset(seeds=7)
    first = sim.observe()
    sim.reset()
    second = sim.observe()
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 6
    sim.reset(seeds=[9, 7, 8])
    np.testing.assert_array_equal(sim.observe()[[1, 2, 0]], first)
    sim.reset()
    np.testing.assert_array_equal(sim.observe()[[1, 2, 0]], second)
    sim.reset_group([0, 2], 4)
    np.testing.assert_array_equal(sim.observe()[0], sim.observe()[2])


@pytest.mark.parametrize("id", ["CartPole-v1", BOX, "TestWalk-v0", "TestUnseeded-v0", "TestOffering-v0"])
def test_snapshot_restore_replay_is_bitwise(id):
    """Case 66 for Gymnasium, noise included; rows serve any number of times and in any place."""
    sim, other = host(id, 3), host(id, 3)
    assert sim.capabilities.snapshot
    sim.reset(seeds=3)
    other.reset(seeds=9)
    play(sim, 0, 12)
    rows, seen = sim.snapshot(), sim.observe()
    future = play(sim, 1, 30)
    for each in (sim, other, sim):
        each.restore(None, rows)
        np.testing.assert_array_equal(each.observe(), seen)
        assert_same_seen(play(each, 1, 30), future)


@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_environments_rebuilt_by_pickling_are_copied_all_the_same(tmp_path, monkeypatch):
    """MuJoCo's own environments lose their state in copy.deepcopy."""
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file there
    sim = host("Hopper-v4", 2)
    sim.reset(seeds=0)
    play(sim, 0, 10)
    rows = sim.snapshot()
    future = play(sim, 1, 20)
    sim.restore(None, rows)
    assert_same_seen(play(sim, 1, 20), future)


def test_one_row_gives_exact_siblings_until_reseeded():
    sim = host("TestWalk-v0", 4)
    sim.reset(seeds=0)
    sim.step([0, 1, 2, 0])
    sim.restore([0, 2, 3], sim.snapshot([1]))
    sim.step([1, 1, 1, 1])
    assert len(np.unique(sim.observe(), axis=0)) == 1
    sim.reseed([0, 2], [5, 6])
    sim.step([1, 1, 1, 1])
    assert len(np.unique(sim.observe(), axis=0)) == 3


def test_what_is_lacking_is_said():
    locked = host("TestLocked-v0", 2)
    assert (locked.capabilities.snapshot, locked.capabilities.seeded) == (False, True)
    locked.reset_group(None, 3)
    np.testing.assert_array_equal(*locked.observe())
    with pytest.raises(ApportionError, match=r"TestLocked-v0 has no snapshots: its state cannot be copied \(TypeError"):
        locked.snapshot()
    with pytest.raises(ApportionError, match="has no snapshots"):
        locked.restore([0], np.empty(1, object))


def test_a_group_by_copying_where_seeds_do_not_repeat():
    sim = host("TestUnseeded-v0", 3)
    assert (sim.capabilities.snapshot, sim.capabilities.seeded) == (True, False)
    sim.reset_group(None, 3)
    assert len(np.unique(sim.observe(), axis=0)) == 1


def test_no_group_where_neither_holds():
    sim = host("TestHopeless-v0", 2)
    with pytest.raises(ApportionError, match="cannot start a group from one state: the same seed does not give"):
        sim.reset_group(None, 0)


def test_an_offered_state_that_is_not_all_is_found_out():
    assert not host("TestLying-v0", 1).capabilities.snapshot


def test_a_broken_environment_ends_alone():
    sim = host("TestFragile-v0", 3)
    sim.reset(seeds=0)
    before = sim.observe()
    step = sim.step([1, 2, 1])
    np.testing.assert_array_equal(step.broken, [False, True, False])
    assert step.reward[1] == 0
    np.testing.assert_array_equal(sim.observe()[1], before[1])
    assert np.isfinite(sim.observe()).all()
    sim.reset(step.broken)
    assert not sim.step([1, 1, 1]).broken.any()


# --- histories


@pytest.mark.parametrize("id", ["CartPole-v1", BOX, "MountainCar-v0"])
def test_a_history_replayed_elsewhere_has_the_same_future(id):
    """Over seeded starts and later ones, with clocks that do not count from the reset."""
    for steps in (0, 7, 230):
        sim, twin = host(id, 3), host(id, 3)
        assert sim.capabilities.replays
        sim.reset(seeds=11)
        sim.clock[:] = [0, 3, 5]
        play(sim, 0, steps)
        rows = sim.history()
        assert rows.shape == (3, sim.history_size)
        assert np.isfinite(rows).all()
        twin.reset(seeds=12)
        play(twin, 1, 9)
        twin.replay(rows)
        np.testing.assert_array_equal(twin.observe(), sim.observe())
        np.testing.assert_array_equal(twin.clock, sim.clock)
        np.testing.assert_array_equal(twin.history(), rows)
        for a, b in zip(play(sim, 2, 60), play(twin, 2, 60), strict=True):
            np.testing.assert_array_equal(a, b)


class Remembering(Walk):
    """Starts where its last episode ended, which no random stream knows."""

    place = 0.0

    def reset(self, *, seed=None, options=None):
        before = 0.0 if seed is not None else self.place
        super().reset(seed=seed)
        self.place += before
        return self.seen(), {}


def test_histories_are_offered_where_they_repeat():
    gymnasium.register("TestRemembering-v0", Remembering)
    can = {name: host(f"Test{name}-v0", 1).capabilities for name in ("Walk", "Unseeded", "Hopeless", "Remembering")}
    assert {name: each.replays for name, each in can.items()} == {
        "Walk": True,
        "Unseeded": False,
        "Hopeless": False,
        "Remembering": False,
    }
    assert can["Remembering"].seeded
    endless = host("TestWalk-v0", 1)
    assert endless.history_size == 0
    endless.reset(seeds=0)
    endless.step([0])
    assert endless._past == [[]]
    del gymnasium.registry["TestRemembering-v0"]


def test_environments_may_cut_themselves():
    sim = host("TestWalk-v0", 1)
    sim._envs[0].unwrapped.limit = np.inf
    sim.reset(seeds=0)
    cut = []
    for _ in range(7):
        sim.step([1])
        cut.append(bool(sim.truncated()[0]))
    assert cut == [False] * 6 + [True]
    sim.reset()
    assert not sim.truncated().any()


@pytest.mark.parametrize(
    ("id", "near"), [("CartPol-v1", "CartPole-v1"), ("CartPole-v99", "CartPole-v1"), ("Half-Cheetah", "HalfCheetah-v5")]
)
def test_unknown_ids_name_the_nearest(id, near):
    with pytest.raises(UnknownName, match=f"did you mean '{near}'"):
        host(id, 1)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("TestWords-v0", "Discrete observations; only Box"),
        ("TestSwitches-v0", r"MultiBinary\(2\) actions; only Discrete and floating Box"),
        ("TestChoices-v0", r"MultiDiscrete\(\[2 3\]\) actions; only Discrete and floating Box"),
        ("TestParts-v0", r"Dict\(.*\) actions; only Discrete and floating Box"),
        ("TestPair-v0", r"Tuple\(.*\) actions; only Discrete and floating Box"),
        ("TestCounts-v0", r"Box\(0, 3, \(2,\), int32\) actions; only Discrete and floating Box"),
        ("TestViews-v0", "Dict observations; only Box"),
        ("TestBoth-v0", "Tuple observations; only Box"),
        ("TestIdle-v0", r"actions of shape \(0,\), which hold nothing"),
        ("TestBlind-v0", r"observations of shape \(0,\), which hold nothing"),
        ("TestNoFile-v0", r"Gymnasium cannot make TestNoFile-v0: .*there_is_no_such_robot\.xml"),
        ("TestBadFile-v0", r"Gymnasium cannot make TestBadFile-v0: XML Error: .*"),
        ("TestMissing-v0", "Gymnasium cannot make TestMissing-v0: box3d is not installed"),
        ("no_such_module_anywhere:Walk-v0", "Gymnasium cannot make no_such_module_anywhere:Walk-v0"),
    ],
)
def test_what_does_not_fit(id, message):
    with pytest.raises(ApportionError, match=message) as caught:
        host(id, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda sim: sim.step([0, 2]), r"must be in \[0, 2\); got 2"),
        (lambda sim: sim.step([0.0, 1.0]), "they must be integers"),
        (lambda sim: sim.step([[0], [1]]), "have shape"),
        (lambda sim: sim.restore(None, np.zeros((2, 5))), "not snapshot rows of CartPole-v1"),
        (lambda sim: sim.restore(None, host(BOX, 2).snapshot()), "not snapshot rows of CartPole-v1"),
    ],
)
def test_bad_input(act, message):
    sim = host("CartPole-v1", 2)
    sim.reset(seeds=0)
    with pytest.raises(InvalidData, match=message):
        act(sim)


def test_the_actions_of_the_dead_are_not_read():
    sim = host("CartPole-v1", 2)
    sim.reset(seeds=0)
    assert sim.step([9, 1], [1]).reward.tolist() == [0, 1]


def test_closing():
    host("CartPole-v1", 2).close()
