"""Law 5 (equal to Gymnasium step by step) and law 4 (replay is bitwise) for the jitted classics."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.control.simulators import SIMULATORS, simulator
from apportion.control.simulators.acrobot import wrap
from apportion.core.errors import UnknownName

IDS = list(SIMULATORS)
STEPS = 1_000
FLOAT32_ULP = 1.2e-7  # relative: observations are compared after Gymnasium's own cast

# The scripted policies reach the ends that random actions do not: a pole that stands until the time limit,
# cars and links that are pumped up to the goal, a pendulum driven round and round.
SCRIPTS = {
    "CartPole-v1": lambda s: int(s[2] + 0.3 * s[3] + 0.05 * s[0] + 0.1 * s[1] > 0),
    "Acrobot-v1": lambda s: 2 if s[3] > 0 else 0,
    "MountainCar-v0": lambda s: 2 if s[1] >= 0 else 0,
    "MountainCarContinuous-v0": lambda s: np.array([1.0 if s[1] >= 0 else -1.0]),
    "Pendulum-v1": lambda s: np.array([3.0 if s[1] >= 0 else -3.0]),
}
# (policy, end) pairs that 1,000 steps must contain.
ENDS = {
    ("CartPole-v1", "random"): {"terminated"},
    ("CartPole-v1", "scripted"): {"truncated"},
    ("Acrobot-v1", "random"): {"truncated"},
    ("Acrobot-v1", "scripted"): {"terminated"},
    ("MountainCar-v0", "random"): {"truncated"},
    ("MountainCar-v0", "scripted"): {"terminated"},
    ("MountainCarContinuous-v0", "random"): {"truncated"},
    ("MountainCarContinuous-v0", "scripted"): {"terminated"},
    ("Pendulum-v1", "random"): {"truncated"},
    ("Pendulum-v1", "scripted"): {"truncated"},
}
START_LOW = {
    "CartPole-v1": [-0.05] * 4,
    "Acrobot-v1": [-0.1] * 4,
    "MountainCar-v0": [-0.6, 0.0],
    "MountainCarContinuous-v0": [-0.6, 0.0],
    "Pendulum-v1": [-np.pi, -1.0],
}
START_HIGH = {
    "CartPole-v1": [0.05] * 4,
    "Acrobot-v1": [0.1] * 4,
    "MountainCar-v0": [-0.4, 0.0],
    "MountainCarContinuous-v0": [-0.4, 0.0],
    "Pendulum-v1": [np.pi, 1.0],
}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def jitted(id):
    sim = SIMULATORS[id]
    return jax.jit(sim.step), jax.jit(sim.observe)


def random_action(sim, rng):
    """Uniform; continuous actions reach half as far again as the bounds, so that clipping is exercised."""
    if sim.action_count:
        return int(rng.integers(sim.action_count))
    return 1.5 * rng.uniform(sim.action_low, sim.action_high)


def random_actions(sim, seed, shape):
    rng = np.random.default_rng(seed)
    actions = np.stack([random_action(sim, rng) for _ in range(int(np.prod(shape)))])
    return jnp.asarray(actions.reshape(*shape, *actions.shape[1:]))


def rollout(sim, state, actions):
    """Observations ``[T O]``, rewards ``[T]`` and terminations ``[T]`` of one environment."""

    def body(state, action):
        state, reward, terminated = sim.step(state, action)
        return state, (sim.observe(state), reward, terminated)

    return jax.lax.scan(body, state, actions)


def physics(env):
    return np.asarray(env.unwrapped.state, np.float64)


def assert_same_step(sim, env, state, action, clock, tolerance):
    """Take one step on both sides, compare everything; return our next state and both flags."""
    step, observe = jitted(sim.id)
    observation, reward, terminated, truncated, _ = env.step(action)
    state, our_reward, our_terminated = step(state, jnp.asarray(action))
    assert state.dtype == our_reward.dtype == jnp.float64
    # Gymnasium stores this one state in float32; elsewhere the comparison is in float64.
    stored = np.float32 if sim.id == "MountainCarContinuous-v0" else np.float64
    np.testing.assert_allclose(np.asarray(state, stored), physics(env), rtol=0, atol=tolerance)
    ours = np.asarray(observe(state), np.float32)
    np.testing.assert_allclose(ours, observation, rtol=FLOAT32_ULP, atol=tolerance)
    np.testing.assert_allclose(float(our_reward), float(reward), rtol=0, atol=tolerance)
    assert bool(our_terminated) == terminated
    assert bool(sim.truncated(clock)) == truncated
    return state, terminated, truncated


def assert_same_run(id, policy, seed, tolerance, synchronised):
    """Take 1,000 steps on both sides, with a reset to one common state after every end of an episode."""
    sim, env = SIMULATORS[id], gymnasium.make(id, disable_env_checker=True)
    rng, ends, clock = np.random.default_rng(seed), set(), 0
    env.reset(seed=seed)
    state = jnp.asarray(physics(env))
    for _ in range(STEPS):
        action = random_action(sim, rng) if policy == "random" else SCRIPTS[id](np.asarray(state))
        if synchronised:
            env.unwrapped.state = np.array(state)
        clock += 1
        state, terminated, truncated = assert_same_step(sim, env, state, action, clock, tolerance)
        ends |= {end for end, met in (("terminated", terminated), ("truncated", truncated)) if met}
        if terminated or truncated:
            observation, _ = env.reset()
            state, clock = jnp.asarray(physics(env)), 0
            ours = np.asarray(sim.observe(state), np.float32)
            np.testing.assert_allclose(ours, observation, rtol=FLOAT32_ULP)
    assert ends >= ENDS[id, policy]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("policy", ["random", "scripted"])
@pytest.mark.parametrize("id", IDS)
def test_every_step_equals_gymnasium(id, policy, seed, float64):
    """From one float64 state, one action leads to one next state, observation, reward and both flags."""
    assert_same_run(id, policy, seed, tolerance=1e-12, synchronised=True)


@pytest.mark.parametrize(("id", "policy"), sorted(ENDS.keys() - {("CartPole-v1", "scripted")}))
def test_free_episodes_stay_with_gymnasium(id, policy, float64):
    """Only the start state is copied; every flag is still the same, the states to fewer digits.

    The physics amplifies the last bit of each step's rounding, most in a fast acrobot. A pole that stands
    for 10 s amplifies it by e^40, so for that pair no two implementations agree; the test above covers it.
    """
    single = id == "MountainCarContinuous-v0"  # Gymnasium's float32 storage
    assert_same_run(id, policy, 0, tolerance=1e-4 if single else 1e-8, synchronised=False)


@pytest.mark.parametrize("id", IDS)
def test_declares_the_sizes_and_bounds_of_gymnasium(id):
    sim, spec = SIMULATORS[id], gymnasium.spec(id)
    env = gymnasium.make(id)
    assert sim.horizon == spec.max_episode_steps
    assert (sim.observation_size,) == env.observation_space.shape
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        assert (sim.action_count, sim.action_size) == (env.action_space.n, 0)
        assert sim.action_low == sim.action_high == ()
    else:
        assert (sim.action_count, sim.action_size) == (0, env.action_space.shape[0])
        assert sim.action_low == tuple(env.action_space.low)
        assert sim.action_high == tuple(env.action_space.high)


@pytest.mark.parametrize("id", IDS)
def test_start_states_have_the_distribution_of_gymnasium(id):
    sim, env, draws = SIMULATORS[id], gymnasium.make(id), 2_000
    ours = np.asarray(jax.vmap(sim.reset)(jax.random.split(jax.random.key(0), draws)))
    env.reset(seed=0)
    theirs = np.stack([(env.reset(), physics(env))[1] for _ in range(draws)])
    width = np.subtract(START_HIGH[id], START_LOW[id])
    # Quantiles of two uniform samples of 2,000 differ by about 1.6% of the width at one standard deviation.
    levels = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
    gap = np.abs(np.quantile(ours, levels, axis=0) - np.quantile(theirs, levels, axis=0))
    assert (gap <= 0.06 * width + 1e-7).all()
    correlation = np.corrcoef(ours[:, width > 0], rowvar=False)
    assert np.abs(correlation - np.eye(np.sum(width > 0))).max() < 0.1


@settings(deadline=None, max_examples=50)
@given(id=st.sampled_from(IDS), seed=st.integers(0, 2**32 - 1))
def test_start_states_stay_in_bounds(id, seed):
    state = SIMULATORS[id].reset(jax.random.key(seed))
    assert state.dtype == jnp.float32
    assert (np.asarray(state) >= np.float32(START_LOW[id])).all()
    assert (np.asarray(state) <= np.float32(START_HIGH[id])).all()


@settings(deadline=None, max_examples=25)
@given(id=st.sampled_from(IDS), seed=st.integers(0, 2**32 - 1))
def test_replay_from_a_snapshot_is_bitwise_the_same(id, seed):
    sim = SIMULATORS[id]
    run = jax.jit(functools.partial(rollout, sim))
    before, after = random_actions(sim, seed, (2, 20))
    snapshot, _ = run(sim.reset(jax.random.key(seed)), before)
    row = np.array(snapshot)  # a copy of the row is the whole snapshot
    first, second = run(snapshot, after), run(jnp.asarray(row), after)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@settings(deadline=None, max_examples=25)
@given(id=st.sampled_from(IDS), seed=st.integers(0, 2**32 - 1))
def test_vmapped_equals_single(id, seed):
    sim, batch = SIMULATORS[id], 5
    states = jax.vmap(sim.reset)(jax.random.split(jax.random.key(seed), batch))
    actions = random_actions(sim, seed, (batch,))
    together = jax.vmap(sim.step)(states, actions)
    for n in range(batch):
        alone = sim.step(states[n], actions[n])
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_allclose(ours[n], theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("id", IDS)
def test_siblings_of_one_row_are_bitwise_the_same(id):
    """G copies of a row under the same actions stay equal, when the batch fills the vector unit.

    XLA may round the remainder of a batch (here, rows past a multiple of 16) differently in the last bit.
    """
    sim, G, T = SIMULATORS[id], 64, 50
    state = jnp.tile(sim.reset(jax.random.key(3)), (G, 1))
    actions = random_actions(sim, 3, (T,))
    actions = jnp.broadcast_to(actions, (G, *actions.shape))
    _, books = jax.jit(jax.vmap(functools.partial(rollout, sim)))(state, actions)
    for book in books:
        np.testing.assert_array_equal(book, np.broadcast_to(book[:1], book.shape))


@pytest.mark.parametrize("id", IDS)
def test_float32_stays_float32(id):
    sim = SIMULATORS[id]
    state = sim.reset(jax.random.key(0))
    after, reward, terminated = sim.step(state, random_actions(sim, 0, (1,))[0])
    assert {state.dtype, after.dtype, reward.dtype, sim.observe(after).dtype} == {jnp.dtype("float32")}
    assert terminated.dtype == bool
    assert sim.observe(after).shape == (sim.observation_size,)
    assert reward.shape == terminated.shape == ()
    assert after.shape == state.shape


@pytest.mark.parametrize("id", IDS)
def test_float32_step_is_the_float64_step_rounded(id, float64):
    sim = SIMULATORS[id]
    states, _ = jax.vmap(functools.partial(rollout, sim))(
        jax.vmap(sim.reset)(jax.random.split(jax.random.key(0), 50)), random_actions(sim, 0, (50, 30))
    )
    states, actions = states.astype(jnp.float32), random_actions(sim, 1, (50,))
    single = jax.vmap(sim.step)(states, actions)
    double = jax.vmap(sim.step)(states.astype(jnp.float64), actions)
    for ours, exact in zip(single, double, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("id", IDS)
def test_dtype_follows_the_state_and_not_the_action(id, float64):
    sim = SIMULATORS[id]
    action = random_actions(sim, 0, (1,))[0]
    for dtype in (jnp.float32, jnp.float64):
        state, reward, _ = sim.step(sim.reset(jax.random.key(0)).astype(dtype), action)
        assert state.dtype == reward.dtype == dtype


@settings(deadline=None, max_examples=200)
@given(angle=st.floats(-60.0, 60.0))
def test_wrap_equals_the_loop_of_gymnasium(angle):
    from gymnasium.envs.classic_control import acrobot

    with jax.enable_x64(True):
        ours = float(wrap(jnp.asarray(angle)))
    assert abs(ours - acrobot.wrap(angle, -np.pi, np.pi)) < 1e-12


def test_truncation_counts_steps_like_the_time_limit():
    sim = simulator("CartPole-v1")
    assert sim.truncated(jnp.array([0, 499, 500, 501])).tolist() == [False, False, True, True]


def test_unknown_id_names_the_known_ones():
    with pytest.raises(UnknownName, match="CartPole-v1"):
        simulator("CartPole-v9")
