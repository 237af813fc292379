"""The one training loop: every method runs, a run can be stopped and resumed bitwise, and it goes where it should."""

import dataclasses

import numpy as np
import pytest

from apportion.core.catalogue import METHODS, dapo, distill, dpo, grpo, ppo, ppo_rlhf, raft, rloo, trpo
from apportion.core.errors import ApportionError
from apportion.core.parts import AdaptiveBeta, KeepAccepted, KeepMixed
from apportion.core.update import NaturalGradient
from apportion.toy import policy
from apportion.toy.language import language
from apportion.toy.train import begin, natural_step, preset, train

TOY = language("toy")
START = 0.2058  # KL(pi_ref || pi*), mean over prompts


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("task", ["toy", "toy-eos"])
def test_every_method_of_the_catalogue_trains(name, task):
    steps = 2 if name == "ppo" else 12
    run = train(preset(METHODS[name]), language(task), steps, seed=3)
    assert run["step"].tolist() == list(range(steps + 1))
    assert all(np.isfinite(run[k]).all() for k in ("kl_to_optimum", "kl_to_reference", "expected_reward"))
    assert run.final["kl_to_reference"] > 0
    assert run["expected_reward"][0] == pytest.approx(
        policy.expected_reward(language(task), language(task).reference).mean()
    )


RESUMED = {
    "rloo": (preset(rloo), {}),
    "ppo with minibatches": (preset(ppo).set("sampler.epochs", 2).set("sampler.minibatches", 4), {}),
    "a filter that refills": (preset(dapo), {}),
    "a natural gradient": (trpo, {}),
    "a controller of beta": (preset(rloo).set("kl.adaptive", AdaptiveBeta(0.1, 100.0)), {}),
    "a data set of pairs": (preset(dpo), {"pool": 100, "batch": 32}),
    "distillation": (preset(distill), {}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_resumes_bitwise(name):
    method, options = RESUMED[name]
    whole = train(method, TOY, 10, seed=5, every=2, **options)
    half = train(method, TOY, 10, seed=5, every=2, until=4, **options)
    rest = train(method, TOY, 10, seed=5, every=2, resume=half.state, **options)
    assert half.state.step == 4
    assert rest.rows == whole.rows
    for mine, theirs in ((rest.state, whole.state), (rest.state.adam, whole.state.adam)):
        for field in dataclasses.fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else field.name == "adam" or a == b


def test_nothing_is_shared_with_the_state_resumed_from():
    half = train(preset(ppo_rlhf), TOY, 4, seed=0, until=2)
    before = half.state.logits.copy(), half.state.critic.copy(), dict(half.state.rng)
    train(preset(ppo_rlhf), TOY, 4, seed=0, resume=half.state)
    assert np.array_equal(before[0], half.state.logits)
    assert np.array_equal(before[1], half.state.critic)
    assert before[2] == half.state.rng


def test_the_seed_is_the_only_chance():
    runs = [train(preset(grpo), TOY, 5, seed=s).final for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_leave_one_out_with_the_kl_in_the_reward_heads_for_the_optimum():
    run = train(preset(rloo), TOY, 150, seed=0)
    assert run["kl_to_optimum"][0] > START
    assert run.final["kl_to_optimum"] < 0.05


def test_offline_rejection_sampling_heads_for_the_optimum_of_its_acceptance():
    offline = raft.replace(sampler=raft.sampler.replace(group=1, proposer="reference", keep=KeepAccepted(0.5)))
    run = train(preset(offline), TOY, 150, seed=0, pool=20_000)
    assert run.final["kl_to_optimum"] < 0.05


def test_progress_is_called_at_each_measurement():
    seen = []
    train(
        preset(rloo), TOY, 6, seed=0, every=4, callback=lambda step, steps, row: seen.append((step, steps, row["step"]))
    )
    assert seen == [(0, 6, 0.0), (4, 6, 4.0), (6, 6, 6.0)]


def test_a_filter_that_runs_dry_says_so():
    hard = np.array(TOY.reference)
    hard[..., 0] += 50.0  # every prompt says 0 0 0 0, so that all siblings are right or all are wrong
    start = dataclasses.replace(begin(dapo, TOY, 0), logits=hard)
    dry = dapo.replace(sampler=dapo.sampler.replace(keep=KeepMixed(max_batches=2)))
    run = train(preset(dry), TOY, 3, resume=start)
    assert "in 3 of 3 steps, 2 batches did not fill one" in run.notes[0]
    assert np.array_equal(run.state.logits, hard)


def test_group_is_siblings_or_separate_rows_or_pairs():
    for method, group in ((grpo, 5), (ppo_rlhf, 5), (dpo, 6)):
        assert train(preset(method), TOY, 1, group=group).final["step"] == 1
    assert train(preset(rloo), TOY, 1, group=None).final["step"] == 1


def test_bad_input_is_named():
    with pytest.raises(ApportionError, match="steps is 0"):
        train(rloo, TOY, 0)
    with pytest.raises(ApportionError, match="samples from the policy"):
        train(rloo, TOY, 1, pool=10)


def test_the_natural_step_solves_the_damped_fisher():
    """Against the Fisher matrix written out, on one prefix of one prompt; backtracking off."""
    rng = np.random.default_rng(0)
    logits, g, share = rng.normal(size=(1, 1, 5)), rng.normal(size=(1, 1, 5)), np.array([[0.7]])
    rule = NaturalGradient(delta=1e-6, damping=0.05)
    p = np.exp(policy.log_softmax(logits))[0, 0]
    fisher = 0.7 * (np.diag(p) - np.outer(p, p)) + 0.05 * np.eye(5)
    x = np.linalg.solve(fisher, g[0, 0])
    moved = natural_step(rule, logits, g, share, gain=lambda _: 1.0)
    assert (moved - logits)[0, 0] == pytest.approx(np.sqrt(2e-6 / (g[0, 0] @ x)) * x, rel=1e-9)
    assert natural_step(rule, logits, g, share, gain=lambda _: -1.0) is logits
