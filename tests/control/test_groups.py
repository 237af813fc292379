"""What a collection of episodes is: true groups from one exact state, each sibling with its own randomness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import small

from apportion.control import Engine, Setup, engine, simulator
from apportion.control.collect import episodes, segment, start_stream
from apportion.control.train import prepare

GROUPS = 4


def drawn(method, monkeypatch):
    """The start states [N width D] and the collection [T N width ...] of one iteration."""
    seen = {}

    def spy(sim, policy, parameters, starts, *rest):
        seen["starts"], seen["book"] = starts, episodes(sim, policy, parameters, starts, *rest)
        return seen["book"]

    monkeypatch.setattr(engine, "episodes", spy)
    built = Engine(method, simulator("CartPole-v1"), Setup(envs=GROUPS, hidden=(8,)), 1_000)
    after, _ = built.iterate(built.init(0))
    width = method.sampler.group + method.sampler.greedy
    starts = np.asarray(seen["starts"]).reshape(GROUPS, width, -1)
    return (
        starts,
        jax.tree.map(lambda x: np.asarray(x).reshape(x.shape[0], GROUPS, width, *x.shape[2:]), seen["book"]),
        after,
    )


@pytest.mark.slow
def test_siblings_share_one_start_state_and_no_randomness(monkeypatch):
    """Case 24: the same draws for all siblings would make every advantage 0."""
    starts, book, after = drawn(small("dr_grpo", group=6, horizon=60), monkeypatch)
    assert np.array_equal(starts, np.repeat(starts[:, :1], 6, axis=1))
    assert len(np.unique(starts[:, 0], axis=0)) == GROUPS
    assert np.array_equal(book.observation[0], starts)
    for n in range(GROUPS):
        paths = {tuple(book.action[:12, n, g]) for g in range(6)}
        assert len(paths) == 6
    assert int(after.env_steps) == book.mask.sum()


@pytest.mark.slow
def test_independent_siblings_start_apart(monkeypatch):
    starts, _, _ = drawn(small("reinforce_batch_mean", group=2, horizon=20), monkeypatch)
    assert len(np.unique(starts.reshape(-1, starts.shape[-1]), axis=0)) == GROUPS * 2


@pytest.mark.slow
def test_greedy_companion_takes_the_mode_and_is_counted(monkeypatch):
    starts, book, after = drawn(small("remax", horizon=40), monkeypatch)
    assert np.array_equal(starts[:, 0], starts[:, 1])
    built = Engine(small("remax", horizon=40), simulator("CartPole-v1"), Setup(envs=GROUPS, hidden=(8,)), 1_000)
    mode = built.policy.mode(built.parameters(built.init(0)), book.observation)
    live = book.mask[:, :, 1]
    assert np.array_equal(book.action[:, :, 1][live], np.asarray(mode)[:, :, 1][live])
    assert int(after.env_steps) == book.mask.sum() > live.sum() > 0


def test_masked_rows_hold_nothing():
    sim = simulator("CartPole-v1")
    built = Engine(small("dr_grpo"), sim, Setup(envs=2, hidden=(8,)), 1_000)
    parameters = built.parameters(built.init(0))
    starts = jax.vmap(sim.reset)(jax.random.split(jax.random.key(1), 3))
    book = jax.jit(lambda p, s: episodes(sim, built.policy, p, s, jax.random.key(2), jnp.zeros(3, bool), 50))(
        parameters, starts
    )
    lengths = book.mask.sum(0)
    for m in range(3):
        n = int(lengths[m])
        assert bool(book.mask[:n, m].all())
        assert not bool(book.mask[n:, m].any())
        assert float(book.reward[:, m].sum()) == n
        assert bool(book.terminated[n - 1, m]) ^ bool(book.truncated[n - 1, m])
        assert int(book.terminated[:, m].sum() + book.truncated[:, m].sum()) == 1


def test_a_stream_goes_on_where_it_stopped():
    """Two segments of 20 see the states that one of 40 would, given the actions; episodes end at the time limit."""
    sim = simulator("MountainCar-v0")
    built = Engine(small("a2c", horizon=20), sim, Setup(envs=3, hidden=(8,)), 10_000)
    stream = start_stream(sim, jax.random.key(0), 3)
    parameters = built.parameters(built.init(0))
    run = jax.jit(lambda s, k: segment(sim, built.policy, parameters, s, k, 20))
    total = 0
    for i in range(10):
        before = stream
        stream, book, finished = run(stream, jax.random.key(i))
        assert np.array_equal(book.observation[0], before.state)
        assert np.array_equal(book.observation[1:], book.next_observation[:-1])
        total += int(finished.episodes)
    assert total == 3  # 200 steps each
    assert bool(book.truncated[-1].all())
    assert np.array_equal(stream.clock, [0, 0, 0])
    assert float(finished.total) == -600.0


def test_dynamic_sampling_draws_again_and_counts_every_step() -> None:
    """DAPO refills dropped groups up to its cap; the throw-away draws are paid for."""
    few = prepare("dapo", "MountainCar-v0", 10_000, {"setup.envs": 2, "sampler.group": 3})
    many = prepare(
        "dapo", "MountainCar-v0", 10_000, {"setup.envs": 2, "sampler.group": 3, "sampler.keep.max_batches": 3}
    )
    # At the start nobody reaches the flag: every return is -200, and no group ever speaks.
    once, _ = jax.jit(few.iterate)(few.init(0))
    thrice, metrics = jax.jit(many.iterate)(many.init(0))
    assert (int(once.env_steps), int(thrice.env_steps)) == (6 * 200, 3 * 6 * 200)
    assert int(metrics.finished.episodes) == 18
    assert float(metrics.kept) == 0.0
    np.testing.assert_array_equal(thrice.parameters, many.init(0).parameters)


def test_dynamic_sampling_keeps_groups_that_speak() -> None:
    """Only silent groups are replaced; on CartPole the first draw already speaks."""
    engine = prepare("dapo", "CartPole-v1", 10_000, {"sampler.keep.max_batches": 4})
    single = prepare("dapo", "CartPole-v1", 10_000)
    after, _ = jax.jit(engine.iterate)(engine.init(3))
    alone, _ = jax.jit(single.iterate)(single.init(3))
    np.testing.assert_array_equal(after.parameters, alone.parameters)
