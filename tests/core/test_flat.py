"""`flat` prints the arithmetic that `advantages` and `weights` do: executed, it gives the same w."""

import dataclasses

import numpy as np
import pytest

from apportion.core.catalogue import METHODS
from apportion.core.flat import flat
from apportion.core.method import Method
from apportion.core.parts import (
    KL,
    BatchStd,
    Cap,
    Clip,
    Constant,
    DecisionRatio,
    GroupStd,
    KeepAccepted,
    LeaveOneOut,
    RewardToGo,
    SequenceRatio,
    SiblingMean,
    Total,
)
from apportion.core.rollouts import Rollouts
from apportion.core.sampler import Sampler
from apportion.core.weigh import advantages, weights

N, T = 3, 6
VARIANTS = {
    "discounted": Method("x", sampler=Sampler(group=3), credit=Total(0.9), aggregate=Constant(4.0)),
    "k2 in the loss": METHODS["grpo"].replace(kl=KL("loss", "k2", beta=0.1)),
    "k3 corrected": METHODS["grpo"].replace(kl=KL("loss", "k3", beta=0.1, corrected=True)),
    "k2 in the reward": METHODS["rloo"].replace(kl=KL("reward", "k2", beta=0.1)),
    "k3 in the reward": METHODS["rloo"].replace(kl=KL("reward", "k3", beta=0.1)),
    "product ratio": METHODS["gspo"].replace(ratio=SequenceRatio(geometric=False), trust=Clip(0.5, 0.5)),
    "dual clip": METHODS["ppo"].replace(trust=Clip(0.2, 0.2, dual=1.1)),
    "cap with a floor": METHODS["cispo"].replace(trust=Cap(1.1, 0.9)),
    "not centred": METHODS["ppo"].replace(scale=BatchStd(ddof=0, center=False)),
    "sample spread": METHODS["grpo"].replace(scale=GroupStd(ddof=1)),
    "others alive": Method(
        "x", sampler=Sampler(group=3), credit=RewardToGo(0.9), baseline=SiblingMean(True), ratio=DecisionRatio()
    ),
    "rejection sampling": Method("x", sampler=Sampler(group=3, keep=KeepAccepted()), baseline=LeaveOneOut()),
}


def ragged(method: Method, seed: int) -> tuple[Rollouts, np.ndarray]:
    """Rollouts of unequal length, some cut by a time limit, with holes that are no decisions, and log pi now."""
    rng = np.random.default_rng(seed)
    G = method.sampler.group
    shape = (N, G, T)
    length = rng.integers(1, T + 1, size=(N, G))
    index = np.arange(T)
    inside = index < length[..., None]
    last = index == length[..., None] - 1
    mask = inside & ((rng.random(shape) < 0.8) | last)
    cut = (rng.random((N, G)) < 0.3)[..., None]
    reward = np.where(inside, rng.normal(size=shape).round(2), 0)
    if method.sampler.feedback == "preference":  # a pair is labelled chosen and rejected
        chosen = rng.integers(0, 2, size=(N, 1, 1))
        reward = np.where(last, np.arange(G)[:, None] == chosen, 0.0)
    logq, logref = np.log(rng.uniform(0.1, 1, shape)), np.log(rng.uniform(0.1, 1, shape))
    rollouts = Rollouts(
        reward=reward,
        mask=mask,
        logq=logq,
        logref=logref,
        terminated=last & ~cut,
        truncated=last & cut,
        value=rng.normal(size=shape),
        next_value=rng.normal(size=shape),
        step=inside,
        greedy_return=rng.normal(size=N),
        mass=np.array([0.5, 0.3, 0.2]),
        horizon=T,
    )
    return rollouts.check(), logq + rng.normal(scale=0.2, size=shape)


def run(method: Method, rollouts: Rollouts, logp: np.ndarray) -> dict:
    """What the printed program computes."""
    names = ("reward", "mask", "logq", "logref", "value", "next_value", "terminated", "step", "greedy_return", "mass")
    scope = {name: getattr(rollouts, name) for name in names}
    scope |= {"logp": logp, "ended": rollouts.end, "horizon": rollouts.horizon}
    exec(flat(method), scope)
    return scope


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("method", [*METHODS.values(), *VARIANTS.values()], ids=[*METHODS, *VARIANTS])
def test_the_printed_program_computes_the_weights(method, seed):
    rollouts, logp = ragged(method, seed)
    ledger = weights(method, advantages(method, rollouts), logp)
    scope = run(method, rollouts, logp)
    mask = rollouts.mask
    np.testing.assert_allclose(scope["w"], ledger.w, rtol=0, atol=1e-12)
    np.testing.assert_allclose(scope["advantage"][mask], ledger.advantage[mask], rtol=0, atol=1e-12)
    np.testing.assert_allclose(scope["share"][mask], ledger.share[mask], rtol=0, atol=1e-12)
    assert np.abs(ledger.w).max() > 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "gspo"])
def test_a_group_of_equal_rewards_weighs_nothing_in_the_printed_program_too(name):
    method = METHODS[name]
    rollouts, logp = ragged(method, 0)
    reward = rollouts.reward.copy()
    reward[0] = 0.0
    reward[0, :, 0] = 0.1
    same = dataclasses.replace(rollouts, reward=reward)
    ledger = weights(method, advantages(method, same), logp)
    scope = run(method, same, logp)
    np.testing.assert_allclose(scope["w"], ledger.w, rtol=0, atol=1e-12)


def test_it_names_what_it_reads_and_nothing_else():
    text = flat(METHODS["reinforce"])
    assert "# logref" not in text
    assert "def backwards" not in text
    assert "# logref" in flat(METHODS["grpo"])
    assert "def backwards" in flat(METHODS["ppo"])
