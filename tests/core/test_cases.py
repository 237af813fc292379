"""The reported failures of the field that concern advantages, denominators, ratio, clip, KL, returns and GAE.

Numbered as in the list of known cases: the example with its right value, then its whole kind.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apportion.core import catalogue as c
from apportion.core.errors import InvalidMethod
from apportion.core.method import Method
from apportion.core.parts import (
    GAE,
    KL,
    BatchStd,
    Cap,
    Clip,
    Constant,
    DecisionMean,
    DecisionRatio,
    GroupMean,
    GroupStd,
    KeepMixed,
    LeaveOneOut,
    NoKL,
    RewardToGo,
    SequenceMean,
    SequenceRatio,
    Sum,
)
from apportion.core.parts.kl import estimate
from apportion.core.rollouts import Rollouts
from apportion.core.sampler import Sampler
from apportion.core.weigh import advantages, weights
from core.books import draw, for_method, rollouts, rows, single

RLOO = c.rloo.replace(kl=NoKL())
GRPO = c.grpo.replace(kl=NoKL())
GROUPED = [m for m in c.METHODS.values() if m.sampler.group > 1 and m.sampler.feedback == "reward" and m is not c.raft]
numbers = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))
groups = st.integers(2, 12).flatmap(lambda G: st.lists(numbers, min_size=G, max_size=G))


def adv(method: Method, book: Rollouts) -> Any:
    """Advantages of one group or batch, one a trajectory."""
    return advantages(method, book).advantage[..., 0].squeeze(0)


def w_of(method: Method, book: Rollouts, logp: Any = None) -> Any:
    return weights(method, advantages(method, book), book.logq if logp is None else logp).w


def close(actual: Any, desired: Any, atol: float = 1e-7) -> None:
    np.testing.assert_allclose(actual, desired, rtol=1e-7, atol=atol)


def binary_groups(p: float, G: int) -> tuple[Any, Any]:
    """All outcomes [2^G G] of G draws of a Bernoulli(p), and their probabilities."""
    outcomes = np.array(list(itertools.product([0.0, 1.0], repeat=G)))
    return outcomes, np.prod(np.where(outcomes > 0, p, 1 - p), axis=1)


def expected_gradient(method: Method, p: float, G: int) -> float:
    """Exact expected update of the logit of a one-step Bernoulli policy with r = a."""
    actions, mass = binary_groups(p, G)
    book = replace(single(actions, mass=mass), logref=np.zeros((*actions.shape, 1)))
    return float((w_of(method, book)[..., 0] * (actions - p)).sum())


# --- group advantages ---


def test_case_01_ddof_is_the_one_that_the_method_names():
    population, sample = (GRPO.replace(scale=GroupStd(ddof=ddof, eps=0.0)) for ddof in (0, 1))
    close(adv(population, single([1, 0, 0, 0])), [1.7320508, -0.5773503, -0.5773503, -0.5773503])
    close(adv(sample, single([1, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5])
    close(adv(population, single([1, 0])), [1, -1])
    close(adv(sample, single([1, 0])), [0.7071068, -0.7071068])
    close(adv(population, single([1] * 3 + [0] * 5)), [1.2909944] * 3 + [-0.7745967] * 5)
    close(adv(sample, single([1] * 3 + [0] * 5)), [1.2076147] * 3 + [-0.7245688] * 5)


@given(groups)
def test_case_01_the_two_differ_by_one_factor(r):
    assume(np.ptp(r) > 1e-3)
    population, sample = (GRPO.replace(scale=GroupStd(ddof=ddof, eps=0.0)) for ddof in (0, 1))
    G = len(r)
    close(adv(population, single(r)), math.sqrt(G / (G - 1)) * adv(sample, single(r)))
    close(adv(sample, single(r)), (np.array(r) - np.mean(r)) / np.std(r, ddof=1))


@pytest.mark.parametrize("method", GROUPED, ids=lambda m: m.name)
def test_case_03_a_group_of_one_is_refused(method):
    with pytest.raises(InvalidMethod, match=r"compares siblings, but the group size is 1; set sampler.group to 2"):
        method.set("sampler.group", 1)


@pytest.mark.parametrize("method", GROUPED, ids=lambda m: m.name)
@given(alone=st.integers(0, 3), seed=st.integers(0, 1000))
def test_case_03_a_sibling_left_alone_gets_no_advantage(method, alone, seed):
    book = for_method(method, seed, N=1, T=3, steps=False)
    book["logref"] = book["logq"]
    ledger = advantages(method, replace(rollouts(book), scored=np.arange(4)[None] == alone))
    assert (ledger.advantage * book["mask"] == 0).all()
    assert np.isfinite(weights(method, ledger, book["logp"]).w).all()


def test_case_03_without_a_baseline_the_return_stays():
    close(adv(c.reinforce, single([0.7])), [0.7])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", GROUPED, ids=lambda m: m.name)
@given(reward=numbers, G=st.integers(2, 40), T=st.integers(1, 5))
def test_case_04_equal_rewards_give_exactly_nothing(method, dtype, reward, G, T):
    r = np.zeros((2, G, T), dtype)
    r[..., -1] = reward
    book = Rollouts(reward=r, mask=r == r, logq=0 * r, logref=0 * r, horizon=T)
    assert (advantages(method, book).advantage == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_04_the_reported_one(dtype):
    assert (adv(GRPO, single(np.full(8, 0.6, dtype))) == 0).all()
    assert (adv(RLOO, single(np.full(8, 0.1 + 0.2, dtype))) == 0).all()


def test_case_05_leave_one_out_over_the_spread_of_the_group():
    close(adv(RLOO, single([1, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])
    scaled = RLOO.replace(scale=GroupStd(ddof=1, eps=0.0))
    close(adv(scaled, single([1, 0, 0, 0])), [2, -2 / 3, -2 / 3, -2 / 3])


@given(groups)
def test_case_05_it_sums_to_zero_and_only_stretches_the_mean_baseline(r):
    assume(np.ptp(r) > 1e-3)
    G = len(r)
    ours = adv(RLOO, single(r))
    close(ours, [x - np.mean(np.delete(r, i)) for i, x in enumerate(r)], atol=1e-9)
    close(ours.sum(), 0, atol=1e-9)
    for scale in (c.dr_grpo.scale, GroupStd(ddof=1, eps=0.0)):
        mean = adv(Method("mean", Sampler(group=8), baseline=GroupMean(), scale=scale), single(r))
        one_out = adv(Method("one", Sampler(group=8), baseline=LeaveOneOut(), scale=scale), single(r))
        close(one_out, G / (G - 1) * mean, atol=1e-9)


def test_case_07_the_filter_keeps_or_drops_whole_groups():
    close(KeepMixed()(single([1, 0, 0, 0])), np.ones((1, 4)))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=6))
def test_case_07_for_any_groups(r):
    keep = KeepMixed()(single(np.array(r)))
    close(keep, np.repeat([[float(len(set(row)) > 1)] for row in r], 4, axis=1))


def test_case_09_the_remainder_of_a_fixed_stride_is_a_group_of_one():
    """Three rewards at stride 2: groups [1, 2] and [3, nothing]."""
    book = single([[1.0, 2.0], [3.0, np.nan]], scored=np.array([[True, True], [True, False]]))
    close(advantages(GRPO.replace(scale=GroupStd(0, 0.0)), book.check()).advantage[..., 0], [[-1, 1], [0, 0]])


@given(n=st.integers(2, 25), G=st.integers(2, 6), seed=st.integers(0, 99))
def test_case_09_any_stride_and_remainder(n, G, seed):
    r = np.random.default_rng(seed).normal(size=n)
    padded = np.full(-(-n // G) * G, np.nan)
    padded[:n] = r
    book = single(padded.reshape(-1, G), scored=np.isfinite(padded).reshape(-1, G))
    ours = advantages(RLOO, book.check()).advantage.ravel()[:n]
    for start in range(0, n, G):
        group = r[start : start + G]
        right = [x - np.mean(np.delete(group, i)) if len(group) > 1 else 0.0 for i, x in enumerate(group)]
        close(ours[start : start + G], right, atol=1e-12)


def test_case_10_interleaved_repetition_is_a_transpose_not_a_guess():
    """Prompts p1, p2, p1, p2: the axes say who is whose sibling."""
    r = np.array([1.0, 0.0, 1.0, 0.0])
    assert (advantages(c.dr_grpo, replace(single(r.reshape(2, 2).T), horizon=1)).advantage == 0).all()
    close(np.abs(advantages(c.dr_grpo, replace(single(r.reshape(2, 2)), horizon=1)).advantage), 0.5)


@given(arrays(float, (3, 5), elements=numbers))
def test_case_10_any_interleaving(r):
    interleaved = r.T.ravel()  # p1 p2 p3 p1 p2 p3 ...
    ours = advantages(RLOO, single(interleaved.reshape(5, 3).T)).advantage[..., 0]
    close(ours, r - (r.sum(1, keepdims=True) - r) / 4, atol=1e-9)


def test_case_11_two_requests_of_one_prompt_are_two_groups():
    method = c.dr_grpo.replace(aggregate=Sum())
    close(advantages(method, single([[1, 0], [1, 1]])).advantage.ravel(), [0.5, -0.5, 0, 0])
    close(adv(method, single([1, 0, 1, 1])), [0.25, -0.75, 0.25, 0.25])


@given(arrays(float, (4, 3), elements=numbers))
def test_case_11_a_group_never_hears_of_another(r):
    for method in (RLOO, GRPO, c.dr_grpo.replace(aggregate=Sum())):
        together = advantages(method, single(r)).advantage
        apart = np.concatenate([advantages(method, single(row)).advantage for row in r])
        np.testing.assert_array_equal(together, apart)


def test_case_13_a_reward_of_none_leaves_the_baseline():
    book = single([1.0, np.nan, 0.0, np.nan], scored=np.array([[True, False, True, False]])).check()
    close(adv(c.dr_grpo.replace(aggregate=Sum()), book), [0.5, 0, -0.5, 0])
    close(adv(RLOO, book), [1, 0, -1, 0])


@pytest.mark.parametrize("method", [m for m in GROUPED if m.scale.scope != "batch"], ids=lambda m: m.name)
@given(
    seed=st.integers(0, 1000),
    scored=arrays(bool, (2, 4)),
    left_behind=st.sampled_from([0.0, 1e6, math.nan, -math.inf]),
)
def test_case_13_whatever_an_unscored_row_holds(method, seed, scored, left_behind):
    """Advantages are those of the scored siblings alone."""
    book = for_method(method, seed, N=2, T=4)
    book["reward"] = np.where(scored[..., None], book["reward"], left_behind)
    ours = advantages(method, replace(rollouts(book), scored=scored).check()).advantage * book["mask"]
    assert (ours[~scored] == 0).all()
    for n in range(2):
        alone = {k: v if v is None or k == "horizon" else v[n : n + 1] for k, v in book.items()}
        alone = {k: v[:, scored[n]] if getattr(v, "ndim", 0) == 3 else v for k, v in alone.items()}
        if scored[n].sum() > 1:
            close(ours[n][scored[n]], (advantages(method, rollouts(alone)).advantage * alone["mask"])[0], atol=1e-9)


def test_case_15_the_mean_baseline_shrinks_the_gradient():
    close(expected_gradient(RLOO, 0.5, 2), 0.25)
    close(expected_gradient(c.dr_grpo.replace(aggregate=Sum()), 0.5, 2), 0.125)


@given(p=st.floats(0.01, 0.99), G=st.integers(2, 6))
def test_case_15_by_one_over_g_at_every_p(p, G):
    close(expected_gradient(RLOO, p, G), p * (1 - p), atol=1e-12)
    close(expected_gradient(c.dr_grpo.replace(aggregate=Sum()), p, G), (1 - 1 / G) * p * (1 - p), atol=1e-12)


def test_case_16_the_spread_changes_the_target():
    method = GRPO.replace(scale=GroupStd(ddof=0, eps=0.0))
    close(expected_gradient(method, 0.1, 4), 0.152125, atol=1e-6)
    close(expected_gradient(method, 0.5, 4), 0.404006, atol=1e-6)


@given(p=st.floats(0.01, 0.99), G=st.integers(2, 8))
def test_case_16_expected_gradient_is_the_mean_spread(p, G):
    outcomes, mass = binary_groups(p, G)
    m = outcomes.mean(1)
    method = GRPO.replace(scale=GroupStd(ddof=0, eps=0.0))
    close(expected_gradient(method, p, G), (mass * np.sqrt(m * (1 - m))).sum(), atol=1e-12)
    if G == 2:
        half = expected_gradient(RLOO, p, 2)
        close(expected_gradient(method, p, 2), half, atol=1e-12)


@pytest.mark.parametrize(
    ("G", "uniform", "prompts"), [(2, 0.70238, 3.360), (4, 0.44904, 1.815), (8, 0.20066, 1.251), (16, 0.04026, 1.042)]
)
def test_case_18_chance_of_a_group_without_signal(G, uniform, prompts):
    outcomes, mass = binary_groups(0.1819, G)
    dropped = mass[KeepMixed()(single(outcomes))[:, 0] == 0].sum()
    close(dropped, uniform, atol=5e-6)
    close(1 / (1 - dropped), prompts, atol=5e-4)


@given(r=st.sampled_from([0.0, 1.0]), G=st.integers(2, 8))
def test_case_18_nothing_kept_is_no_update_and_the_search_has_an_end(r, G):
    assert c.dapo.sampler.keep.max_batches >= 1
    assert (w_of(c.dapo, single(np.full((3, G), r))) == 0).all()


def test_case_19_uniform_up_to_rounding_is_uniform():
    assert (KeepMixed()(single([0.1 + 0.2, 0.3])) == 0).all()


@given(parts=st.lists(st.floats(0.01, 1), min_size=3, max_size=6), dtype=st.sampled_from([np.float32, np.float64]))
def test_case_19_any_order_of_the_same_sum(parts, dtype):
    r = np.array([np.array(order, dtype) for order in itertools.islice(itertools.permutations(parts), 6)])[None]
    book = Rollouts(reward=r, mask=r == r, logq=0 * r)
    assert (KeepMixed()(book) == 0).all()
    assert (advantages(GRPO, book).advantage == 0).all()


def test_case_22_kl_in_the_reward_goes_through_the_baseline():
    book = replace(single([1, 0]), logref=np.array([[[-2.0], [0.0]]]))
    close(adv(c.rloo.replace(kl=KL("reward", "k1", beta=0.1)), book), [0.8, -0.8])


@given(seed=st.integers(0, 999), beta=st.floats(0, 2), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_case_22_as_if_the_task_had_paid_it(seed, beta, estimator):
    book = rollouts(draw(seed))
    penalty = np.where(book.mask, estimate(estimator, book.logq, book.logref), 0)
    paid = replace(book, reward=book.reward - beta * penalty)
    for base in (RLOO, GRPO, c.remax, c.ppo):
        shaped = advantages(base.replace(kl=KL("reward", estimator, beta=beta)), book)
        close(shaped.advantage, advantages(base, paid).advantage, atol=1e-9)
        np.testing.assert_array_equal(shaped.reward, book.reward)


def test_case_23_the_greedy_baseline_is_a_whole_return():
    book = rows([-0.1, -0.1, 0.8], greedy_return=np.array([0.5]))
    close(advantages(c.remax, book).advantage.ravel(), [0.1, 0.2, 0.3])
    turns = rows([-0.1, -0.1, 0.8], greedy_return=np.array([0.2 + 0.3]))
    close(advantages(c.remax, turns).advantage.ravel(), [0.1, 0.2, 0.3])


@given(seed=st.integers(0, 999))
def test_case_23_off_every_reward_to_go(seed):
    book = rollouts(draw(seed, holes=False))
    togo = np.flip(np.cumsum(np.flip(book.reward, -1), -1), -1)
    close(advantages(c.remax, book).advantage, togo - book.greedy_return[:, None, None], atol=1e-12)


@pytest.mark.parametrize(("logp", "loss"), [([1, 1, 1, 1], -2.5), ([1, 0, 0, 0], -0.25)])
@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_case_25_row_i_meets_its_own_advantage_under_any_split(logp, loss, cuts):
    """Two devices, micro-batches of two."""
    ledger = advantages(c.reinforce, single([[1], [2], [3], [4]]))
    logp = np.array(logp, float).reshape(4, 1, 1)
    parts = np.split(np.arange(4), cuts)
    total = sum((weights(c.reinforce, ledger.map(lambda x, at=at: x[at]), logp[at]).w * logp[at]).sum() for at in parts)
    close(-total, loss)


def test_case_26_the_spread_is_of_the_whole_collection_not_of_each_rank():
    for ddof, std in ((1, 1.2909944), (0, 1.1180340)):
        batch = advantages(c.reinforce.replace(scale=BatchStd(ddof=ddof, eps=0.0)), single([[1], [2], [3], [4]]))
        close(batch.scale, std)


@given(r=arrays(float, (6,), elements=numbers), ddof=st.sampled_from([0, 1]))
def test_case_26_whatever_the_number_of_ranks(r, ddof):
    assume(np.ptp(r) > 1e-2)
    for ranks in (1, 2, 3, 6):
        ledger = advantages(c.reinforce.replace(scale=BatchStd(ddof=ddof, eps=0.0)), single(r.reshape(ranks, -1)))
        close(ledger.advantage.ravel(), (r - r.mean()) / r.std(ddof=ddof), atol=1e-9)


# --- loss aggregation: A has 2 decisions of loss 1, B has 8 of loss 0 ---

TWO = rows([0.0] * 2, [0.0] * 8)
LOSS = np.zeros((1, 2, 8))
LOSS[0, 0, :2] = 1.0


def aggregated(aggregate: Any, book: Rollouts = TWO, loss: Any = LOSS) -> float:
    share = aggregate(book, np.ones(book.mask.shape[:2]))
    return float((share * loss[..., : share.shape[-1]]).sum())


def test_case_27_five_aggregations_five_answers():
    close(aggregated(SequenceMean()), 0.5)
    close(aggregated(DecisionMean()), 0.2)
    close(aggregated(Sum()), 1.0)
    close(aggregated(Constant(10)), 0.1)
    close(aggregated(Constant(8)), 0.125)


@given(seed=st.integers(0, 9999))
def test_case_27_each_by_its_formula(seed):
    book = draw(seed)
    m, x = book["mask"], np.random.default_rng(seed).normal(size=book["mask"].shape)
    lengths, rows_ = m.sum(-1), m.shape[0] * m.shape[1]
    r = rollouts(book)
    close(aggregated(SequenceMean(), r, x), ((m * x).sum(-1) / lengths).mean())
    close(aggregated(DecisionMean(), r, x), x[m].mean())
    close(aggregated(Sum(), r, x), (m * x).sum() / rows_)
    close(aggregated(Constant(17), r, x), (m * x).sum() / rows_ / 17)
    close(aggregated(Constant(), r, x), (m * x).sum() / rows_ / book["horizon"])


def test_case_29_two_micro_batches_divide_once():
    share = DecisionMean()(TWO, np.ones((1, 2)))
    close(sum((share * LOSS)[:, i].sum() for i in range(2)), 0.2)


def test_case_30_two_updates_from_one_collection_each_a_mean():
    """4 micro-batches of 10 decisions and loss sum 1, two an update: an update's mean is 2/20, not 2/40."""
    method = Method("two updates", Sampler(minibatches=2), ratio=DecisionRatio(), aggregate=DecisionMean())
    ones = np.ones((4, 1, 10))
    book = Rollouts(reward=0 * ones, mask=ones > 0, logq=0 * ones)
    share = method.aggregate(book, method.sampler.keep(book))
    loss = ones / 10
    for update in ([0, 1], [2, 3]):
        close(method.sampler.minibatches * sum((share * loss)[micro].sum() for micro in update), 0.1)


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
@given(seed=st.integers(0, 99))
def test_case_32_everything_masked_is_no_update(method, seed):
    book = for_method(method, seed, N=2, T=3)
    book["mask"] = np.zeros_like(book["mask"])
    ledger = weights(method, advantages(method, rollouts(book)), book["logp"])
    assert (ledger.w == 0).all()
    assert all(np.isfinite(getattr(ledger, x)).all() for x in ("credit", "baseline", "scale", "share", "ratio"))


@pytest.mark.parametrize("width", [8, 16])
def test_case_34_the_padded_width_is_no_divisor(width):
    book = rows([0.0] * 2, [0.0] * 8, width=width)
    loss = np.zeros((1, 2, width))
    loss[0, 0, :2] = 1
    close(aggregated(Constant(16), book, loss), 0.0625)
    close(aggregated(Constant(), replace(book, horizon=16), loss), 0.0625)


def length_drift(aggregate: Any, p: float, advantage: float) -> float:
    """Expected gradient, by the logit of S, of A for both answers: S has 1 decision, L a second, forced one."""
    mask = np.array([[[True, False]], [[True, True]]])
    mass = np.array([p, 1 - p])
    reward = np.where(mask, [[[advantage, 0]], [[0, advantage]]], 0)
    book = Rollouts(reward=reward, mask=mask, logq=np.zeros((2, 1, 2)), mass=mass)
    method = Method("drift", aggregate=aggregate)
    score = np.array([1 - p, -p])[:, None, None] * np.array([1.0, 0.0])  # a forced decision has no gradient
    return float((w_of(method, book) * score).sum())


def test_case_37_dividing_by_the_length_drifts():
    close(length_drift(Sum(), 0.5, -1.0), 0.0)
    close(length_drift(SequenceMean(), 0.5, -1.0), -0.125)


@given(p=st.floats(0.01, 0.99), advantage=st.floats(-2, 2))
def test_case_37_at_every_p(p, advantage):
    close(length_drift(Sum(), p, advantage), 0.0, atol=1e-12)
    close(length_drift(Constant(2), p, advantage), 0.0, atol=1e-12)
    close(length_drift(SequenceMean(), p, advantage), advantage * p * (1 - p) / 2, atol=1e-12)


def test_case_38_on_policy_the_loss_is_nothing_and_the_gradient_is_not():
    method = Method("first step", Sampler(group=2), ratio=DecisionRatio(), trust=Clip(), aggregate=SequenceMean())
    book = rows([0, 0, 1.0], [0, 0, -1.0])
    ledger = weights(method, advantages(method, book), book.logq)
    assert (ledger.ratio == 1).all()
    assert (ledger.gate == 1).all()
    close((ledger.share * ledger.advantage * ledger.ratio).sum(), 0)
    close(ledger.w.sum(-1), [[0.5, -0.5]])
    uneven = rows([0, 1.0], [0] * 7 + [-1.0])
    token = advantages(method.replace(aggregate=DecisionMean()), uneven)
    close(-(token.share * token.advantage).sum(), 0.6)


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
@given(seed=st.integers(0, 999))
def test_case_38_the_first_update_clips_nothing(method, seed):
    book = for_method(method, seed)
    ledger = weights(method, advantages(method, rollouts(book)), book["logq"])
    assert (ledger.ratio == 1).all()
    if method is not c.dpo:
        assert (ledger.gate == 1).all()


# --- ratio, clip, sampler ---


@pytest.mark.parametrize(
    ("trust", "advantage", "rho", "loss", "gradient"),
    [
        (Clip(0.2, 0.2), -1.0, 5.0, 5.0, True),
        (Clip(0.2, 0.2, dual=3.0), -1.0, 5.0, 3.0, False),
        (Clip(0.2, 0.2), 1.0, 5.0, -1.2, False),
    ],
)
def test_case_39_clip_conventions(trust, advantage, rho, loss, gradient):
    one = np.ones(1)
    assert bool(trust.gate(rho * one, advantage * one, one, None, one > 0)[0]) is gradient
    value = min(rho * advantage, np.clip(rho, 0.8, 1.2) * advantage)
    value = max(value, trust.dual * advantage) if trust.dual else value
    close(-value, loss)


@given(
    rho=st.floats(0.01, 10),
    advantage=st.floats(-3, 3).filter(lambda x: abs(x) > 1e-3),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 2),
    dual=st.none() | st.floats(1.1, 6),
)
def test_case_39_the_gate_is_where_the_clipped_objective_still_moves(rho, advantage, low, high, dual):
    def objective(x):
        value = min(x * advantage, np.clip(x, 1 - low, 1 + high) * advantage)
        return value if dual is None or advantage > 0 else max(value, dual * advantage)

    kinks = [1 - low, 1 + high] + ([dual] if dual else [])
    assume(min(abs(rho - x) for x in kinks) > 1e-4)
    slope = (objective(rho + 1e-5) - objective(rho - 1e-5)) / 2e-5
    one = np.ones(1)
    gate = Clip(low, high, dual=dual).gate(rho * one, advantage * one, one, None, one > 0)[0]
    close(gate * advantage, slope, atol=1e-6)


def test_case_40_the_cap_is_absolute():
    one = np.ones(1)

    def weight(cap, rho):
        return float(cap.gate(rho * one, one, one, None, one > 0)[0] * rho)

    close(weight(Cap(high=5.0), 6.0), 5.0)
    close(weight(Cap(high=1 + 5.0), 6.0), 6.0)
    close(weight(Cap(high=5.0), 0.5), 0.5)
    close(weight(Cap(high=5.0, low=0.8), 0.5), 0.8)
    assert c.cispo.trust == Cap(high=5.0, low=0.0)


@given(rho=st.floats(1e-6, 1e6), low=st.floats(0, 1), high=st.floats(1, 10), advantage=st.floats(-3, 3))
def test_case_40_for_any_ratio_and_advantage(rho, low, high, advantage):
    one = np.ones(1)
    gate = Cap(high, low).gate(rho * one, advantage * one, one, None, one > 0)
    close(gate * rho, np.clip(rho, low, high))


def test_case_42_a_shadowed_bound_is_not_shadowed_here():
    """verl's clip_ratio alone leaves low and high at .2: ratio 1.15 still pushes. Here the two bounds are the clip."""
    one = np.ones(1)
    assert Clip(0.2, 0.2).gate(1.15 * one, one, one, None, one > 0)[0] == 1
    assert Clip(0.1, 0.1).gate(1.15 * one, one, one, None, one > 0)[0] == 0


def test_case_44_product_and_geometric_mean_are_two_ratios():
    zero, mask = np.zeros((1, 1, 100)), np.ones((1, 1, 100), bool)
    product, mean = SequenceRatio(geometric=False), SequenceRatio(geometric=True)
    close(product(zero - 0.01, zero, mask), 0.3678794)
    close(mean(zero - 0.01, zero, mask), 0.9900498)
    far = product(zero + 0.012, zero, mask)
    close(far[..., 0], 3.3201, atol=1e-4)
    bound = Clip(low=1.0, high=2.0, dual=3.0)
    assert all((bound.gate(far, a + zero, zero, None, mask) == 0).all() for a in (-1.0, 1.0))
    assert "geometric" in repr(mean)


@given(seed=st.integers(0, 999))
def test_case_44_only_the_product_is_an_importance_weight(seed):
    """Its mean under q is 1; the geometric mean's is not."""
    rng = np.random.default_rng(seed)
    q, p = rng.dirichlet(np.ones(3), size=2)
    paths = np.array(list(itertools.product(range(3), repeat=3)))
    logq, logp = np.log(q)[paths][:, None], np.log(p)[paths][:, None]
    mass, mask = np.exp(logq.sum(-1))[:, 0], np.ones(logq.shape, bool)
    close((mass * SequenceRatio(geometric=False)(logp, logq, mask)[:, 0, 0]).sum(), 1.0)
    assume(np.abs(np.log(p / q)).max() > 0.1)
    assert (mass * SequenceRatio(geometric=True)(logp, logq, mask)[:, 0, 0]).sum() < 1 - 1e-6


def test_case_45_both_sides_of_the_ratio_carry_the_temperature():
    def logp(temperature):
        z = np.array([2.0, 0.0]) / temperature
        return (z - np.log(np.exp(z).sum()))[:1].reshape(1, 1, 1)

    on = np.ones((1, 1, 1), bool)
    close(logp(0.5), -0.0181499)
    close(DecisionRatio()(logp(0.5), logp(0.5), on), 1.0)
    close(DecisionRatio()(logp(0.5), logp(1.0), on), 1.1149149)
    assert Sampler(temperature=0.5).temperature == 0.5


# --- KL ---


def kl_gradient(p: float, ref: float, kl: KL) -> float:
    """Exact expected gradient, by the logit, of the KL term of a loss, on-policy."""
    mass = np.array([1 - p, p])
    logp, logref = np.log(mass)[:, None, None], np.log([1 - ref, ref])[:, None, None]
    book = Rollouts(reward=0 * logp, mask=logp < 0, logq=logp, logref=logref, mass=mass)
    score = np.array([-p, 1 - p])[:, None, None]
    return -float((w_of(Method("kl", kl=kl, credit=RewardToGo()), book) * score).sum())


@pytest.mark.filterwarnings("ignore::apportion.core.errors.ApportionWarning")
def test_case_48_gradients_of_the_estimators_in_the_loss():
    close(kl_gradient(0.5, 0.8, KL("loss", "k1", beta=1.0)), 0)
    close(kl_gradient(0.5, 0.8, KL("loss", "k2", beta=1.0)), -0.3465736)
    close(kl_gradient(0.5, 0.8, KL("loss", "k3", beta=1.0)), -0.3)
    close(kl_gradient(0.5, 0.8, KL("loss", "k3", beta=1.0, corrected=True)), -0.3465736)
    close(kl_gradient(0.5, 0.8, KL("reward", "k1", beta=1.0)), -0.3465736)


@given(p=st.floats(0.02, 0.98), ref=st.floats(0.02, 0.98), beta=st.floats(0, 3))
@pytest.mark.filterwarnings("ignore::apportion.core.errors.ApportionWarning")
def test_case_48_for_any_pair_of_policies(p, ref, beta):
    reverse = beta * p * (1 - p) * (math.log(p / (1 - p)) - math.log(ref / (1 - ref)))
    close(kl_gradient(p, ref, KL("loss", "k1", beta=beta)), 0)
    close(kl_gradient(p, ref, KL("loss", "k2", beta=beta)), reverse)
    close(kl_gradient(p, ref, KL("loss", "k3", beta=beta)), beta * (p - ref))  # of the forward KL
    for kind in ("k1", "k3"):
        close(kl_gradient(p, ref, KL("loss", kind, beta=beta, corrected=True)), reverse)
        close(kl_gradient(p, ref, KL("reward", kind, beta=beta)), reverse if kind == "k1" else beta * k3_slope(p, ref))


def k3_slope(p, ref):
    """Score-function gradient of E[k3] with k3 held constant."""
    pairs = [(p, ref, 1 - p), (1 - p, 1 - ref, -p)]
    return sum(x * s * (y / x - 1 - math.log(y / x)) for x, y, s in pairs)


def test_case_50_the_coefficient_is_never_ignored():
    book = replace(single([1.0]), logref=np.array([[[-2.0]]]))
    ledger = advantages(c.reinforce.replace(kl=KL("reward", "k1", beta=0.1)), book)
    close(ledger.reward - ledger.kl, 0.8)
    close(ledger.credit, 0.8)


@pytest.mark.parametrize("method", [m for m in c.METHODS.values() if isinstance(m.kl, KL)], ids=lambda m: m.name)
@given(seed=st.integers(0, 99), beta=st.floats(0.1, 2))
def test_case_50_beta_always_moves_w(method, seed, beta):
    """The method's own beta, another one in its place, and one handed over by a controller."""
    book = for_method(method, seed, holes=False)
    other = method.replace(kl=method.kl.replace(beta=method.kl.beta + beta))
    plain, moved = (w_of(m, rollouts(book), book["logp"]) for m in (method, other))
    assert np.abs(plain - moved).max() > 1e-6
    handed = weights(method, advantages(method, rollouts(book), other.kl.beta), book["logp"], other.kl.beta).w
    np.testing.assert_array_equal(handed, moved)


def test_case_51_a_group_without_spread_still_feels_the_kl():
    p, ref = 0.5, 0.8
    logp, logref = np.log([[[p], [1 - p]]]), np.log([[[ref], [1 - ref]]])
    book = Rollouts(reward=0 * logp + 1, mask=logp < 0, logq=logp, logref=logref)
    score = np.array([[[1 - p], [-p]]])
    method = c.grpo.replace(kl=KL("loss", "k3", beta=0.1))
    assert (advantages(method, book).advantage == 0).all()
    close(-(w_of(method, book) * score).sum(), -0.03)
    masked = method.replace(sampler=method.sampler.replace(keep=KeepMixed()))
    assert (w_of(masked, book) == 0).all()


# --- tokens, returns, GAE ---


def test_case_52_time_does_not_pass_at_a_tools_output():
    book = replace(rows([0.0, 0.0, 1.0]), mask=np.array([[[True, False, True]]]))
    close(RewardToGo(gamma=0.5)(book, book.reward)[book.mask], [0.5, 1.0])


@given(seed=st.integers(0, 9999), gamma=st.floats(0.1, 1), lam=st.floats(0, 1))
def test_case_52_as_if_the_holes_were_cut_out(seed, gamma, lam):
    """Return and GAE of the decisions do not change when tool output stands between them."""
    book = draw(seed)
    r = rollouts(book)
    for credit in (RewardToGo(gamma), GAE(gamma, lam)):
        full = credit(r, r.reward)
        for n, g in np.ndindex(book["mask"].shape[:2]):
            at = np.flatnonzero(book["mask"][n, g])
            short = {k: v[n : n + 1, g : g + 1, at] if getattr(v, "ndim", 0) == 3 else None for k, v in book.items()}
            alone = rollouts(short)
            close(full[n, g, at], credit(alone, alone.reward)[0, 0], atol=1e-9)


@pytest.mark.parametrize("center", [True, False])
@given(x=numbers, pad=st.integers(0, 3))
def test_case_54_one_value_is_not_whitened(center, x, pad):
    book = rows([x], width=1 + pad)
    close(adv(c.reinforce.replace(scale=BatchStd(center=center)), book), [x])
    close(adv(c.reinforce.replace(scale=BatchStd(ddof=0, center=center)), book), [x])


def test_case_55_three_values():
    for ddof, right in ((1, [-1, 0, 1]), (0, [-1.2247449, 0, 1.2247449])):
        close(adv(c.reinforce.replace(scale=BatchStd(ddof=ddof, eps=0.0)), single([1, 2, 3])), right)


@given(r=st.lists(numbers, min_size=2, max_size=9), ddof=st.sampled_from([0, 1]), pad=st.integers(0, 3))
def test_case_55_mean_zero_and_spread_one_over_the_decisions(r, ddof, pad):
    assume(np.ptp(r) > 1e-2)
    book = rows(*[[x] for x in r], width=1 + pad)
    close(adv(c.reinforce.replace(scale=BatchStd(ddof=ddof, eps=0.0)), book), (r - np.mean(r)) / np.std(r, ddof=ddof))


def transition(r: float, v: float, v_next: float, terminated: bool, gamma: float) -> float:
    """One-step TD error of a single decision that ends by the task or by a time limit."""
    one, yes = np.ones((1, 1, 1)), np.ones((1, 1, 1), bool)
    ends = {"terminated": yes & terminated, "truncated": yes & (not terminated)}
    book = Rollouts(reward=r * one, mask=yes, logq=0 * one, value=v * one, next_value=v_next * one, **ends)
    return float(GAE(gamma, 0.95)(book, book.reward)[0, 0, 0] - v)


def test_case_56_a_time_limit_bootstraps_from_the_true_next_state():
    close(transition(1, 10, 8, False, 0.99), -1.08)
    close(transition(1, 10, 8, True, 0.99), -9)


@given(r=numbers, v=numbers, v_next=numbers, gamma=st.floats(0.1, 1))
def test_case_56_for_any_values(r, v, v_next, gamma):
    close(transition(r, v, v_next, False, gamma), r + gamma * v_next - v, atol=1e-9)
    close(transition(r, v, v_next, True, gamma), r - v, atol=1e-9)


def test_case_57_nothing_leaks_over_an_end():
    zero = np.zeros((1, 1, 3))
    book = rows([1.0, 1.0, 1.0], value=zero, next_value=zero, terminated=np.array([[[False, True, False]]]))
    close(GAE(1.0, 1.0)(book, book.reward), [[[2, 1, 1]]])


@given(seed=st.integers(0, 9999), gamma=st.floats(0.1, 1), lam=st.floats(0, 1), T=st.integers(1, 20))
def test_case_57_streams_by_the_definition(seed, gamma, lam, T):
    """The recursion over a stream with ends and time limits anywhere in it, and an open end."""
    rng = np.random.default_rng(seed)
    r, v, v_next = rng.normal(size=(3, 2, 1, T))
    ends = rng.random((2, 1, T))
    terminated, truncated = ends < 0.15, (ends >= 0.15) & (ends < 0.3)
    book = Rollouts(r, r == r, 0 * r, terminated=terminated, truncated=truncated, value=v, next_value=v_next)
    advantage = np.zeros((2, 1, T + 1))
    for t in reversed(range(T)):
        delta = r[..., t] + gamma * np.where(terminated[..., t], 0, v_next[..., t]) - v[..., t]
        on = ~(terminated | truncated)[..., t]
        advantage[..., t] = delta + gamma * lam * on * advantage[..., t + 1]
    close(GAE(gamma, lam)(book, r) - v, advantage[..., :T], atol=1e-9)


def test_case_59_a_reward_at_the_end_reaches_one_step_back_at_lambda_0():
    value = np.array([[[0.3, 0.95]]])
    book = rows([0.0, 1.0], value=value, next_value=np.array([[[0.95, 7.0]]]))
    close(GAE(0.99, 0.0)(book, book.reward), [[[0.9405, 1.0]]])


@given(seed=st.integers(0, 9999), gamma=st.floats(0.1, 1))
def test_case_59_targets_at_lambda_0_are_one_step(seed, gamma):
    book = rollouts(draw(seed, holes=False))
    target = book.reward + gamma * np.where(book.terminated, 0, book.next_value)
    close(GAE(gamma, 0.0)(book, book.reward)[book.mask], target[book.mask], atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ratio", [DecisionRatio(), SequenceRatio(), SequenceRatio(geometric=False)], ids=repr)
@pytest.mark.parametrize("trust", [Clip(0.2, 0.2, dual=3.0), Cap(high=5.0)], ids=repr)
def test_a_ratio_that_overflows_is_bounded_like_any_other(dtype, ratio, trust):
    """A thousand decisions that each became a little likelier: inf times a gate of 0 would be NaN."""
    logq = np.full((1, 2, 1000), -1.0, dtype)
    reward = np.zeros_like(logq)
    reward[0, :, -1] = [1, 0]
    book = Rollouts(reward=reward, mask=logq < 0, logq=logq)
    method = Method("long", Sampler(group=2), baseline=GroupMean(), ratio=ratio, trust=trust, aggregate=SequenceMean())
    for step in (0.5, 100.0, 1e4):
        w = w_of(method, book, logq + dtype(step))
        assert np.isfinite(w).all()
        assert np.abs(w).max() <= 5.0 / 2
        assert isinstance(trust, Cap) or step < 1 or (w == 0).all()
