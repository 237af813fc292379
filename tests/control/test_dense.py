"""The ragged update equals a plain one over dense [N G T] arrays: masked padding never enters, chunks do not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from worlds import small

from apportion.control import Engine, Setup, learn, simulator
from apportion.control.collect import episodes
from apportion.control.engine import grouped, split_greedy
from apportion.core.update import Adam
from apportion.core.weigh import advantages, weights

GROUPS, HORIZON = 3, 30
# Linear where it matters: the step is lr·g/(|g| + eps) with both large, so that it shows the gradient's size.
PLAIN = Adam(1e3, eps=1e3, b1=0.0, b2=0.0)
METHODS = ("reinforce_batch_mean", "remax", "dr_grpo", "dapo", "cispo", "gspo")


def collection(engine, state):
    """The episodes that `engine.iterate(state)` will draw, and the key of its update."""
    _, collect_key, learn_key = jax.random.split(state.key, 3)
    start_key, act_key = jax.random.split(collect_key)
    sampler, groups = engine.method.sampler, engine.setup.envs
    width = sampler.group + sampler.greedy
    shared = sampler.start == "reset"
    starts = jax.vmap(engine.simulator.reset)(jax.random.split(start_key, groups if shared else groups * width))
    starts = jnp.repeat(starts, width if shared else 1, axis=0)
    greedy = jnp.arange(groups * width) % width == sampler.group
    parameters = engine.parameters(state)
    book = episodes(engine.simulator, engine.policy, parameters, starts, act_key, greedy, engine.horizon)
    greedy_return, rest = split_greedy(book, groups, width, sampler.greedy)
    horizon = engine.simulator.horizon
    return book, rest, grouped(rest, (groups, sampler.group), None, None, horizon, greedy_return), learn_key


def minibatches(engine, ledger, key):
    """Membership [N G T] of each minibatch of an epoch: whole trajectories, or single decisions."""
    valid = ledger.share > 0
    cuts = engine.method.sampler.minibatches
    order, bounds = engine.learner._order(valid, key, cuts)
    members = [np.zeros(valid.size, bool) for _ in range(cuts)]
    for member, low, high in zip(members, bounds[:-1], bounds[1:], strict=True):
        member[order[low:high]] = True
    return [m.reshape(valid.shape) for m in members]


def plain_update(engine, state):
    """One iteration written down: no packing, no chunks, every padded cell present."""
    method = engine.method
    _, book, rollouts, key = collection(engine, state)
    ledger = advantages(method, rollouts)
    turn = lambda x: jnp.moveaxis(x, 0, 1).reshape(*rollouts.mask.shape, *x.shape[2:])  # noqa: E731
    observation, action = turn(book.observation), turn(book.action)
    cuts = method.sampler.minibatches

    def loss(flat, part):
        logp, _ = engine.policy.log_prob(engine.learner.unravel(flat), observation, action)
        w = weights(method, ledger, jax.lax.stop_gradient(logp)).w
        return -cuts * jnp.sum(w * part * logp)

    gradient = jax.jit(jax.grad(loss))
    flat = state.parameters
    for epoch_key in jax.random.split(key, method.sampler.epochs):
        parts = minibatches(engine, ledger, epoch_key)
        assert np.array_equal(sum(p.astype(int) for p in parts), np.asarray(ledger.share > 0).astype(int))
        for part in parts:
            g = gradient(flat, part)
            flat = flat - PLAIN.learning_rate * g / (jnp.abs(g) + PLAIN.eps)
    return flat


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_ragged_update_is_the_dense_one(name, monkeypatch):
    monkeypatch.setattr(learn, "CHUNK", 37)  # several chunks, the last one not full
    epochs = 1 if name in ("reinforce_batch_mean", "remax") else 2
    method = small(name, horizon=HORIZON, epochs=epochs).replace(update=PLAIN)
    engine = Engine(method, simulator("CartPole-v1"), Setup(envs=GROUPS, hidden=(8,)), 10_000)
    state = engine.init(1)
    after, metrics = jax.jit(engine.iterate)(state)
    wanted = plain_update(engine, state)
    step = float(jnp.max(jnp.abs(wanted - state.parameters)))
    assert step > 1e-4
    np.testing.assert_allclose(after.parameters, wanted, atol=2e-4 * step)
    # Environment steps are the live decisions, those of greedy companions included.
    everything = collection(engine, state)[0]
    assert int(after.env_steps) == int(jnp.sum(everything.mask)) < everything.mask.size
    assert int(metrics.finished.episodes) == GROUPS * method.sampler.group


def test_more_minibatches_than_trajectories():
    """Some are then empty; none may hold another's rows."""
    method = small("gspo", group=3, minibatches=5, horizon=4)
    engine = Engine(method, simulator("CartPole-v1"), Setup(envs=1, hidden=(8,)), 1_000)
    valid = jnp.array([[[True, True, False], [True, False, False], [False, False, False]]])
    order, bounds = engine.learner._order(valid, jax.random.key(0), 5)
    assert bounds[0] == 0
    assert bounds[-1] == 3
    assert bool(jnp.all(jnp.diff(bounds) >= 0))
    assert sorted(np.asarray(order[:3]).tolist()) == [0, 1, 3]
