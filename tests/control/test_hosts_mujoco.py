"""Laws 4 and 5 for the MuJoCo host: Gymnasium's numbers step by step, and bitwise replay from any snapshot."""

import importlib.resources

import gymnasium
import numpy as np
import pytest

pytest.importorskip("mujoco")

import mujoco
from mujoco.batch import SimulationError

from apportion.control.hosts import TASKS, host
from apportion.control.hosts.base import Host
from apportion.control.hosts.contacts import ContactBatch
from apportion.control.hosts.mujoco import MujocoHost, load
from apportion.core.errors import ApportionError, InvalidData

STEPS = 1_000
TOLERANCE = 1e-12  # of rewards, which sum their terms in another order; everything else is equal bit by bit
ENDS = {
    "HalfCheetah-v5": "truncated",
    "Hopper-v5": "terminated",
    "Walker2d-v5": "terminated",
    "Swimmer-v5": "truncated",
    "Ant-v5": "terminated",
    "Humanoid-v5": "terminated",
    "HumanoidStandup-v5": "truncated",
    "Reacher-v5": "truncated",
    "Pusher-v5": "truncated",
    "InvertedPendulum-v5": "terminated",
    "InvertedDoublePendulum-v5": "terminated",
}
CONTACTS = ["Ant-v5", "Humanoid-v5", "HumanoidStandup-v5"]
each_task = pytest.mark.parametrize("id", TASKS)


def actions_of(sim, rng, dtype=np.float64):
    """Uniform, reaching a fifth beyond the bounds: Gymnasium hands such actions on, and charges for them."""
    low, high = np.array(sim.action_low), np.array(sim.action_high)
    return (1.2 * rng.uniform(low, high, (sim.size, sim.action_size))).astype(dtype)


def play(sim, seed, steps, resets=True):
    """Everything seen in some steps of random actions; ended simulations start anew, each from its own stream."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        reward, terminated, broken = sim.step(actions_of(sim, rng))
        seen.append(np.column_stack([sim.observe(), reward, terminated, broken, *sim.terms.values()]))
        if resets and terminated.any():
            sim.reset(terminated)
            seen.append(sim.observe())
    return seen


def assert_same_seen(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def assert_same_step(sim, env, action, index):
    """Step simulation ``index`` and the environment; returns both flags."""
    actions = np.full((sim.size, sim.action_size), np.nan, action.dtype)
    actions[index] = action
    observation, reward, terminated, truncated, info = env.step(action)
    step = sim.step(actions, [index])
    np.testing.assert_array_equal(sim.observe()[index], observation)
    np.testing.assert_allclose(step.reward[index], reward, rtol=TOLERANCE, atol=TOLERANCE)
    assert (step.terminated[index], sim.truncated()[index]) == (terminated, truncated)
    assert not step.broken.any()
    for name, term in sim.terms.items():
        if name != "reward_constant":
            np.testing.assert_allclose(term[index], info[name], rtol=TOLERANCE, atol=TOLERANCE)
    return terminated, truncated


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@each_task
def test_every_step_equals_gymnasium(id, dtype):
    """One seed, then 1,000 steps over several episodes, whose starts come from the same stream on both sides."""
    sim, env = host(id, 2, threads=1), gymnasium.make(id, disable_env_checker=True)
    rng, ends = np.random.default_rng(0), set()
    observation, _ = env.reset(seed=11)
    sim.reset([1], [11])
    for _ in range(STEPS):
        np.testing.assert_array_equal(sim.observe()[1], observation)
        terminated, truncated = assert_same_step(sim, env, actions_of(sim, rng, dtype)[1], 1)
        observation = sim.observe()[1]
        ends |= {name for name, met in (("terminated", terminated), ("truncated", truncated)) if met}
        if terminated or truncated:
            observation, _ = env.reset()
            sim.reset([1])
    assert ENDS[id] in ends


@each_task
def test_the_description_equals_gymnasium(id):
    sim, env = host(id, 1, threads=1), gymnasium.make(id, disable_env_checker=True)
    assert isinstance(sim, Host)
    assert sim.horizon == env.spec.max_episode_steps
    assert (sim.observation_size,) == env.observation_space.shape
    assert (sim.action_size,) == env.action_space.shape
    assert sim.action_count == 0
    np.testing.assert_array_equal(sim.action_low, env.action_space.low)
    np.testing.assert_array_equal(sim.action_high, env.action_space.high)


@each_task
def test_snapshot_restore_replay_is_bitwise(id):
    """Case 66, met on the way and over ends of episodes: state, lagging fields, clocks and streams all come back."""
    sim = host(id, 4, threads=2)
    sim.reset(seeds=3)
    play(sim, 0, 30)
    rows, seen, clock = sim.snapshot(), sim.observe(), sim.clock.copy()
    future = play(sim, 1, 40)
    sim.restore(None, rows)
    np.testing.assert_array_equal(sim.observe(), seen)
    np.testing.assert_array_equal(sim.clock, clock)
    np.testing.assert_array_equal(sim.snapshot(), rows)
    assert_same_seen(play(sim, 1, 40), future)


@pytest.mark.parametrize("id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_rows_are_good_in_any_place(id):
    """Another host, another order, another number of threads."""
    sim, other = host(id, 4, threads=1), host(id, 4, threads=2)
    sim.reset(seeds=3)
    play(sim, 0, 30)
    rows, order = sim.snapshot(), [2, 0, 3, 1]
    other.restore(order, rows)
    assert np.isfinite(rows).all()
    rng = np.random.default_rng(1)
    for _ in range(20):
        actions = actions_of(sim, rng)
        moved = np.empty_like(actions)
        moved[order] = actions
        np.testing.assert_array_equal(other.step(moved).reward[order], sim.step(actions).reward)
        np.testing.assert_array_equal(other.observe()[order], sim.observe())


@pytest.mark.parametrize("id", ["Walker2d-v5", "Ant-v5", "Reacher-v5"])
def test_one_row_gives_exact_siblings(id):
    sim = host(id, 6, threads=2)
    sim.reset(seeds=0)
    play(sim, 0, 10)
    sim.restore([1, 3, 4], sim.snapshot([5]))
    rng = np.random.default_rng(2)
    for _ in range(20):
        actions = np.repeat(actions_of(sim, rng)[:1], 6, 0)
        reward = sim.step(actions).reward
        for sibling in (1, 3, 4):
            np.testing.assert_array_equal(sim.observe()[sibling], sim.observe()[5])
            assert reward[sibling] == reward[5]
    actions = actions_of(sim, rng)
    sim.step(actions)
    assert not np.array_equal(sim.observe()[1], sim.observe()[5]), "other actions, another future"


def test_what_qpos_and_qvel_leave_out():
    """Case 66, the wrong way: without the rest of the integration state the future drifts after contact."""
    sim = host("HumanoidStandup-v5", 2, threads=1)
    sim.reset(seeds=0)
    play(sim, 0, 50)
    sim.restore([0], sim.snapshot([1]))
    before = mujoco.mjtState.mjSTATE_TIME | mujoco.mjtState.mjSTATE_QPOS | mujoco.mjtState.mjSTATE_QVEL
    at, nv = mujoco.mj_stateSize(load(sim.task), int(before)), load(sim.task).nv
    sim._batch.state[0, at : at + nv] = 0  # the warmstart
    actions = np.repeat(actions_of(sim, np.random.default_rng(1))[:1], 2, 0)
    for _ in range(20):
        sim.step(actions)
    assert not np.array_equal(*sim.observe())


@each_task
def test_only_the_live_ones_move(id):
    sim, alone = host(id, 4, threads=2), host(id, 4, threads=2)
    for each in (sim, alone):
        each.reset(seeds=0)
        play(each, 0, 5, resets=False)
    before, rows = sim.observe(), sim.snapshot([1, 3])
    clock = sim.clock.copy()
    actions = actions_of(sim, np.random.default_rng(1))
    step, whole = sim.step(actions, [2, 0]), alone.step(actions)
    np.testing.assert_array_equal(sim.observe()[[1, 3]], before[[1, 3]])
    np.testing.assert_array_equal(sim.snapshot([1, 3]), rows)
    np.testing.assert_array_equal(sim.clock - clock, [1, 0, 1, 0])
    np.testing.assert_array_equal(sim.observe()[[0, 2]], alone.observe()[[0, 2]])
    np.testing.assert_array_equal(step.reward, np.where([1, 0, 1, 0], whole.reward, 0))
    assert not step.terminated[[1, 3]].any()
    mask = np.array([False, True, False, True])
    np.testing.assert_array_equal(sim.step(actions, mask).reward, np.where(mask, whole.reward, 0))
    np.testing.assert_array_equal(sim.observe(), alone.observe())
    np.testing.assert_array_equal(sim.step(actions, []).reward, 0)


@each_task
def test_reward_is_the_sum_of_its_terms(id):
    sim = host(id, 3, threads=1)
    sim.reset(seeds=0)
    reward = sim.step(actions_of(sim, np.random.default_rng(0)), [0, 2]).reward
    np.testing.assert_allclose(sum(sim.terms.values()), reward, rtol=1e-15)
    assert all(term.shape == (3,) and term.dtype == np.float64 and term[1] == 0 for term in sim.terms.values())


@each_task
def test_seeds(id):
    """Case 68: reset(seed=7) of three is 7, 8, 9: distinct, the same on repeat, and each stream goes on."""
    sim = host(id, 3, threads=1)
    sim.reset(seeds=7)
    first = sim.observe()
    sim.reset()
    second = sim.observe()
    starts = np.concatenate([first, second])
    assert len(np.unique(starts, axis=0)) == 6
    sim.reset(seeds=[9, 7, 8])
    np.testing.assert_array_equal(sim.observe()[[1, 2, 0]], first)
    sim.reset()
    np.testing.assert_array_equal(sim.observe()[[1, 2, 0]], second)
    sim.reset([2, 0], [5, 5])
    np.testing.assert_array_equal(sim.observe()[2], sim.observe()[0])
    sim.reset_group(None, 4)
    assert len(np.unique(sim.observe(), axis=0)) == 1


def test_siblings_share_a_stream_until_reseeded():
    sim = host("Hopper-v5", 2, threads=1)
    sim.reset(seeds=0)
    sim.restore([1], sim.snapshot([0]))
    state = sim.observe()
    sim.reseed([1], [5])
    np.testing.assert_array_equal(sim.observe(), state)
    sim.reset()
    assert not np.array_equal(*sim.observe())


def test_without_seeds_starts_differ():
    first, second = host("Swimmer-v5", 2, threads=1), host("Swimmer-v5", 2, threads=1)
    first.reset()
    second.reset()
    assert len(np.unique(np.concatenate([first.observe(), second.observe()]), axis=0)) == 4


@pytest.mark.parametrize("poison", ["state", "huge", "action"])
@pytest.mark.parametrize("id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_a_broken_simulation_ends_alone(id, poison, capfd):
    """Non-finite is flagged, worth nothing, seen by nobody; the others do what they would have done."""
    sim, healthy = host(id, 4, threads=2), host(id, 4, threads=2)
    for each in (sim, healthy):
        each.reset(seeds=0)
        play(each, 0, 5, resets=False)
    actions = actions_of(sim, np.random.default_rng(1))
    expected = healthy.step(actions)
    if poison == "action":
        actions[2] = np.nan
    else:
        sim._physics["qvel"][2, 0] = np.nan if poison == "state" else 1e12
    step = sim.step(actions)
    np.testing.assert_array_equal(step.broken, [False, False, True, False])
    assert step.reward[2] == 0
    assert not step.terminated[2]
    others = [0, 1, 3]
    np.testing.assert_array_equal(step.reward[others], expected.reward[others])
    np.testing.assert_array_equal(sim.observe()[others], healthy.observe()[others])
    assert np.isfinite(sim.observe()).all()
    assert all(np.isfinite(term).all() for term in sim.terms.values())
    sim.reset([2])
    assert not sim.step(actions_of(sim, np.random.default_rng(2))).broken.any()
    assert "WARNING" not in "".join(capfd.readouterr())


def test_mujocos_own_errors_break_one_simulation(monkeypatch):
    """A failure that MuJoCo raises instead of warning about, such as a full arena."""
    sim = host("Hopper-v5", 3, threads=1)
    sim.reset(seeds=0)
    step = sim._batch.step

    def failing(ids, nstep):
        step([0, 2], nstep=nstep)
        raise SimulationError(np.array([1]), "arena is full")

    monkeypatch.setattr(sim._batch, "step", failing)
    np.testing.assert_array_equal(sim.step(np.zeros((3, 3))).broken, [False, True, False])


def test_an_error_among_contact_forces_stays_alone():
    """With too small an arena, bodies on the floor fail and the one in the air goes on."""
    path = importlib.resources.files("gymnasium") / "envs" / "mujoco" / "assets" / "humanoidstandup.xml"
    for memory in range(60_000, 30_000, -2_000):
        spec = mujoco.MjSpec.from_file(str(path))
        spec.memory = memory
        small, ample = ContactBatch(spec.compile(), 3, 2), ContactBatch(load(TASKS["HumanoidStandup-v5"]), 3, 2)
        try:
            for batch in (ample, small):
                batch.reset()
                batch.bind("qpos")[1, 2] = 3.0
            for _ in range(10):
                ample.step(None, 5)
                small.step(None, 5)
        except SimulationError as error:
            np.testing.assert_array_equal(error.ids, [0, 2])
            np.testing.assert_array_equal(small.state[1], ample.state[1])
            return
    pytest.skip("no size of arena fails the floor and not the air in this version of MuJoCo")


@pytest.mark.parametrize("id", CONTACTS)
def test_contact_forces_are_felt(id):
    """They are zero after a reset, as in Gymnasium, and not after a fall."""
    sim = host(id, 2, threads=1)
    sim.reset(seeds=0)
    assert not sim._physics["cfrc_ext"].any()
    while not sim._physics["cfrc_ext"].any(axis=(1, 2)).all():
        assert sim.clock[0] < 200
        play(sim, int(sim.clock[0]), 1, resets=False)
    sim.reset([0])
    assert not sim._physics["cfrc_ext"][0].any()
    assert sim._physics["cfrc_ext"][1].any()


def test_the_observation_is_not_a_view():
    sim = host("InvertedPendulum-v5", 2, threads=1)
    sim.reset(seeds=0)
    seen = sim.observe()
    kept = seen.copy()
    sim.step(np.ones((2, 1)))
    np.testing.assert_array_equal(seen, kept)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda sim: sim.step(np.zeros((2, 3))), "actions of Swimmer-v5 have shape"),
        (lambda sim: sim.step(np.zeros(2)), "actions of Swimmer-v5 have shape"),
        (lambda sim: sim.reset([2]), r"ids must be in \[0, 2\)"),
        (lambda sim: sim.reset([-1]), r"ids must be in \[0, 2\)"),
        (lambda sim: sim.reset([0, 0]), "repeat"),
        (lambda sim: sim.reset([0.5]), "integers"),
        (lambda sim: sim.reset([True, False, True]), "mask"),
        (lambda sim: sim.reset(seeds=[1]), "1 seeds for 2"),
        (lambda sim: sim.reset(seeds=-1), "seeds must be 0 or more"),
        (lambda sim: sim.restore(None, np.zeros((2, 3))), "entries; Swimmer-v5 needs"),
        (lambda sim: sim.restore([0], sim.snapshot()), "2 snapshot rows for 1"),
        (lambda sim: sim.restore(None, np.nan * sim.snapshot()), "not finite"),
    ],
)
def test_bad_input(act, message):
    sim = host("Swimmer-v5", 2, threads=1)
    with pytest.raises(InvalidData, match=message):
        act(sim)


def test_a_model_that_does_not_load(monkeypatch):
    from dataclasses import replace

    with pytest.raises(ApportionError, match="the model of Ant-v5 does not load"):
        load(replace(TASKS["Ant-v5"], xml="no_such.xml"))


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (2.5, 1), (2, 0)])
def test_sizes(size, threads):
    with pytest.raises(ApportionError, match="whole number of 1 or more"):
        host("Ant-v5", size, threads)


def test_without_mujoco_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "apportion.control.hosts.mujoco")
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ApportionError, match=r"apportion\[mujoco\]"):
        host("Ant-v5", 1)


def test_hosts_load_no_simulator():
    import subprocess
    import sys

    code = "import sys, apportion.control.hosts; print([m for m in ('mujoco', 'gymnasium') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_eleven():
    assert len(TASKS) == 11
    assert all(isinstance(host(id, 1, threads=1), MujocoHost) for id in TASKS)
