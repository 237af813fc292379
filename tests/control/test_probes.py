"""Five worlds with known answers: what fails here says where the fault is before any real task does."""

import numpy as np
import pytest
from worlds import ACTION, CONSTANT, DELAYED, MATCH, OBSERVED, small

from apportion import control

GAMMA = 0.9
SETUP = control.Setup(envs=16, hidden=(16,))


def critic(run, observations):
    x = np.asarray(observations, np.float32)[:, None]
    return np.asarray(run.engine.policy.value(run.policy.networks, x))


def ppo():
    method = small("ppo", horizon=16, epochs=4)
    return method.replace(credit=method.credit.replace(gamma=GAMMA))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "observations", "values"),
    [
        (CONSTANT, [1.0], [1.0]),  # wrong: the critic or its loss
        (OBSERVED, [-1.0, 1.0], [-1.0, 1.0]),  # wrong: the critic does not see the observation
        (DELAYED, [0.0, 1.0], [GAMMA, 1.0]),  # wrong: discounting, or an end that is not an end
    ],
    ids=["constant", "observed", "delayed"],
)
def test_the_critic_learns_the_known_value(world, observations, values):
    run = control.train(ppo(), world, steps=12_000, setup=SETUP)
    assert critic(run, observations) == pytest.approx(values, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("world", [ACTION, MATCH], ids=["action", "match"])
@pytest.mark.parametrize(
    "method",
    [ppo(), small("dr_grpo", group=4), small("reinforce_togo"), small("reinforce_batch_mean")],
    ids=lambda m: m.name.partition("[")[0],
)
def test_the_policy_learns_the_known_action(world, method):
    """Wrong on `action`: the sign or the size of the step; wrong on `match` alone: rows of the batch are mixed up."""
    run = control.train(method, world, steps=6_000, setup=SETUP)
    best, _ = run.policy.predict([[-1.0], [1.0]])
    assert best[1] == (0 if world is ACTION else 1)
    assert world is ACTION or best[0] == 0
    assert run.summary["return_mean"] == 1.0
    assert run.metrics[-1]["return_mean"] > 0.9
    assert run.evaluate(episodes=7).returns.tolist() == [1.0] * 7
