"""The toy language against its published numbers, its own identities and finite differences."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.errors import ApportionError, UnknownName
from apportion.toy import policy
from apportion.toy.adam import adam_ascend, adam_start, cosine
from apportion.toy.language import RECIPES, language

TASKS = sorted(RECIPES)
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=15, deadline=None)
each_task = pytest.mark.parametrize("name", TASKS)


def random_logits(lang, seed, scale=2.0):
    return np.random.default_rng(seed).normal(scale=scale, size=lang.reference.shape)


# --- the tasks are the published ones --------------------------------------------------------------------


def test_reference_success_rates():
    lang = language("toy")
    success = policy.expected_reward(lang, lang.reference)
    assert success.round(3).tolist() == [0.017, 0.187, 0.707, 0.439]
    zero_signal = success**8 + (1 - success) ** 8
    assert zero_signal == pytest.approx([0.869, 0.19, 0.063, 0.011], abs=5e-4)


def test_optimum_of_the_fixed_length_task():
    lang = language("toy")
    best = policy.tilted(lang, 0.5)
    distance = policy.kl(best.log_probs, policy.sequence_log_probs(lang, lang.reference))
    assert distance.mean() == pytest.approx(0.29, abs=5e-3)
    assert policy.expected_reward(lang, best.logits).mean() == pytest.approx(0.64, abs=5e-3)


def test_reference_lengths_with_an_end_of_sequence():
    lang = language("toy-eos")
    correct, wrong = policy.mean_length(lang, lang.reference)
    assert correct.mean() == pytest.approx(4.53, abs=5e-3)
    assert wrong.mean() == pytest.approx(3.97, abs=5e-3)


def test_padded_strings_reduce_to_distinct_responses():
    """Of the 5**6 padded strings, the listed ones are those that say nothing after their end of sequence."""
    lang = language("toy-eos")
    said = np.indices((lang.V,) * lang.L).reshape(lang.L, -1).T
    assert len(said) == 15_625
    after = np.cumsum(said == lang.eos, axis=1)
    kept = {tuple(s) for s, a in zip(said, after, strict=True) if np.all(s[1:][a[:-1] > 0] == lang.eos)}
    assert kept == {tuple(s) for s in lang.sequences}
    assert len(lang.sequences) == sum(4**k for k in range(6)) + 4**6


@each_task
def test_reward_is_the_stated_rule(name):
    lang = language(name)
    for s in range(0, len(lang.sequences), 7):
        tokens = lang.sequences[s, : lang.length[s]].tolist()
        content = [t for t in tokens if t != lang.eos]
        modulus = lang.V if lang.eos is None else lang.V - 1
        expected = [float(bool(content) and sum(content) % modulus == target) for target in lang.targets]
        assert lang.reward[:, s].tolist() == expected


@each_task
def test_tree_indices_agree_with_each_other(name):
    lang = language(name)
    meaning = {}
    for tokens, prefix, mask, end in zip(lang.sequences, lang.prefix, lang.mask, lang.end, strict=True):
        for t in range(int(mask.sum())):
            said = tuple(tokens[:t])
            assert meaning.setdefault(prefix[t], said) == said
        assert end == prefix[t] * lang.V + tokens[t]
    assert len(meaning) == len(set(meaning.values())) == lang.prefixes
    assert np.array_equal(~lang.child.ravel()[lang.end], np.arange(len(lang.sequences)))


def test_language_is_built_once_and_cannot_be_written():
    lang = language("toy")
    assert language("toy") is lang
    with pytest.raises(ValueError, match="read-only"):
        lang.reward[0, 0] = 1.0


def test_unknown_task_is_named():
    with pytest.raises(UnknownName, match="toy-eos"):
        language("toy-eso")


# --- distributions ---------------------------------------------------------------------------------------


@each_task
@quick
@given(seed=seeds, scale=st.floats(0.0, 30.0))
def test_masses_and_sums(name, seed, scale):
    lang = language(name)
    logits = random_logits(lang, seed, scale)
    mass = policy.mass(lang, logits)
    assert mass.sum(axis=1) == pytest.approx(np.ones(4), abs=1e-12)
    assert policy.decision_log_probs(lang, logits).sum(axis=-1) == pytest.approx(
        policy.sequence_log_probs(lang, logits), rel=1e-12, abs=1e-12
    )
    assert policy.prefix_mass(lang, logits).sum(axis=1) == pytest.approx(mass @ lang.length, rel=1e-12)


@each_task
@quick
@given(seed=seeds)
def test_rows_agree_with_the_enumeration(name, seed):
    lang = language(name)
    logits = random_logits(lang, seed)
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(lang.sequences), size=(4, 3))
    prompts, flat = rng.integers(4, size=9), rng.integers(len(lang.sequences), size=9)
    for whole, part in (
        (policy.decision_log_probs(lang, logits), policy.decision_log_probs),
        (policy.score_norm2(lang, logits), policy.score_norm2),
    ):
        grouped = whole[np.arange(4)[:, None], rows]
        assert part(lang, logits, rows) == pytest.approx(grouped, rel=1e-12, abs=1e-12)
        assert part(lang, logits, flat, prompts) == pytest.approx(whole[prompts, flat], rel=1e-12, abs=1e-12)


@each_task
@quick
@given(seed=seeds, scale=st.floats(0.1, 5.0))
def test_conditionals_round_trip(name, seed, scale):
    lang = language(name)
    logits = random_logits(lang, seed, scale)
    again = policy.logits_of(lang, policy.sequence_log_probs(lang, logits))
    assert again == pytest.approx(policy.log_softmax(logits), abs=1e-9)


def test_conditionals_of_a_distribution_with_holes():
    """Only correct responses: the mass is reproduced exactly and prefixes that cannot occur stay finite."""
    lang = language("toy-eos")
    with np.errstate(divide="ignore"):
        only = np.log(lang.reward / lang.reward.sum(axis=1, keepdims=True))
    logits = policy.logits_of(lang, only)
    assert not np.isnan(logits).any()
    assert policy.mass(lang, logits) == pytest.approx(np.exp(only), abs=1e-14)
    assert policy.kl(only, policy.sequence_log_probs(lang, logits)) == pytest.approx(np.zeros(4), abs=1e-12)


@each_task
@quick
@given(seed=seeds, beta=st.floats(0.05, 20.0))
def test_optimum_as_a_policy_and_as_an_identity(name, seed, beta):
    """J(pi) = beta log Z - beta KL(pi || pi*), for every policy."""
    lang = language(name)
    best = policy.tilted(lang, beta)
    assert policy.sequence_log_probs(lang, best.logits) == pytest.approx(best.log_probs, abs=1e-9)
    logits = random_logits(lang, seed)
    log_p = policy.sequence_log_probs(lang, logits)
    penalty = policy.kl(log_p, policy.sequence_log_probs(lang, lang.reference))
    gain = policy.expected_reward(lang, logits) - beta * penalty
    distance = policy.kl(log_p, best.log_probs)
    assert np.all(distance >= 0)
    assert gain == pytest.approx(beta * (best.log_partition - distance), abs=1e-9)


def test_optimum_needs_a_positive_penalty():
    with pytest.raises(ApportionError, match="beta"):
        policy.tilted(language("toy"), 0.0)
    lang = language("toy")
    assert policy.tilted(lang, np.inf).logits == pytest.approx(policy.log_softmax(lang.reference), abs=1e-12)


# --- gradients -------------------------------------------------------------------------------------------


def finite_difference(function, logits, direction, step=1e-5):
    return (function(logits + step * direction) - function(logits - step * direction)) / (2 * step)


@each_task
@quick
@given(seed=seeds)
def test_score_sum_is_the_gradient_of_weighted_log_probs(name, seed):
    lang = language(name)
    rng = np.random.default_rng(seed)
    logits, direction = random_logits(lang, seed), rng.normal(size=lang.reference.shape)
    rows = rng.integers(len(lang.sequences), size=(4, 5))
    weight = rng.normal(size=(4, 5, lang.L))

    def objective(x):
        return (weight * policy.decision_log_probs(lang, x, rows)).sum()

    gradient = policy.score_sum(lang, logits, weight, rows)
    assert (gradient * direction).sum() == pytest.approx(
        finite_difference(objective, logits, direction), rel=1e-6, abs=1e-7
    )


@each_task
@quick
@given(seed=seeds)
def test_rows_and_enumeration_have_the_same_gradient(name, seed):
    lang = language(name)
    rng = np.random.default_rng(seed)
    logits = random_logits(lang, seed)
    rows, weight = rng.integers(len(lang.sequences), size=(4, 6)), rng.normal(size=(4, 6, lang.L))
    whole = np.zeros((4, len(lang.sequences), lang.L))
    np.add.at(whole, (np.arange(4)[:, None], rows), weight)
    part = policy.score_sum(lang, logits, weight, rows)
    assert part == pytest.approx(policy.score_sum(lang, logits, whole), abs=1e-12)
    order = rng.permutation(24)
    prompts = np.repeat(np.arange(4), 6)[order]
    shuffled = policy.score_sum(lang, logits, weight.reshape(24, -1)[order], rows.ravel()[order], prompts)
    assert part == pytest.approx(shuffled, abs=1e-12)


@each_task
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_true_gradient_against_finite_differences(name, beta):
    lang = language(name)
    reference = policy.sequence_log_probs(lang, lang.reference)
    logits = lang.reference + random_logits(lang, 0, 0.3)

    def reward(x):
        return policy.expected_reward(lang, x).sum()

    def penalty(x):
        return policy.kl(policy.sequence_log_probs(lang, x), reference).sum()

    gradient = policy.true_gradient(lang, logits, beta)
    for seed in range(5):
        direction = np.random.default_rng(seed).normal(size=logits.shape)
        slopes = [finite_difference(f, logits, direction) for f in (reward, penalty)]
        assert (gradient.reward * direction).sum() == pytest.approx(slopes[0], rel=1e-6, abs=1e-8)
        assert (gradient.kl * direction).sum() == pytest.approx(slopes[1], rel=1e-6, abs=1e-8)
        assert (gradient.total * direction).sum() == pytest.approx(slopes[0] - beta * slopes[1], rel=1e-6, abs=1e-8)


@each_task
def test_gradient_vanishes_at_the_optimum(name):
    lang = language(name)
    best = policy.tilted(lang, 0.5)
    assert np.abs(policy.true_gradient(lang, best.logits, 0.5).total).max() < 1e-14


@each_task
@quick
@given(seed=seeds)
def test_true_gradient_is_mass_times_advantage(name, seed):
    """The policy-gradient theorem: d(prefix) p(token) (Q - V), computed without a score."""
    lang = language(name)
    logits = random_logits(lang, seed)
    state, action = policy.values(lang, logits)
    theorem = np.exp(policy.edge_log_mass(lang, logits)) * (action - state[..., None])
    assert policy.true_gradient(lang, logits).reward == pytest.approx(theorem, abs=1e-12)


@each_task
def test_score_norm_is_the_squared_length_of_one_score(name):
    lang = language(name)
    logits = random_logits(lang, 3)
    norm2 = policy.score_norm2(lang, logits)
    for s, t in [(0, 0), (17, 1), (300, lang.L - 1)]:
        weight = np.zeros((4, 1, lang.L))
        weight[2, 0, t] = 1.0
        rows = np.full((4, 1), s)
        one = policy.score_sum(lang, logits, weight, rows)
        assert norm2[2, s, t] == pytest.approx((one**2).sum(), abs=1e-12)
    assert np.all(norm2[:, lang.mask == 0] == 0)


# --- values ----------------------------------------------------------------------------------------------


@each_task
@quick
@given(seed=seeds)
def test_values_are_conditional_means_of_returns_to_go(name, seed):
    lang = language(name)
    logits = random_logits(lang, seed)
    table = np.random.default_rng(seed).normal(size=logits.shape)
    per_decision = table.reshape(4, -1)[:, lang.edge] * lang.mask
    to_go = per_decision[..., ::-1].cumsum(axis=-1)[..., ::-1]
    state = policy.values(lang, logits, table).state
    assert state == pytest.approx(policy.conditional_mean(lang, logits, to_go), rel=1e-8, abs=1e-8)
    assert state[:, 0] == pytest.approx((policy.mass(lang, logits) * per_decision.sum(axis=-1)).sum(axis=-1))
    assert policy.values(lang, logits).state[:, 0] == pytest.approx(policy.expected_reward(lang, logits))


def test_value_of_the_log_ratio_is_the_kl():
    lang = language("toy-eos")
    logits = random_logits(lang, 1, 0.5)
    table = policy.log_softmax(logits) - policy.log_softmax(lang.reference)
    exact = policy.kl(*(policy.sequence_log_probs(lang, x) for x in (logits, lang.reference)))
    assert policy.values(lang, logits, table).state[:, 0] == pytest.approx(exact)


# --- speaking --------------------------------------------------------------------------------------------


@each_task
def test_samples_follow_the_masses(name):
    lang = language(name)
    draws = 50_000
    rows = policy.sample(lang, lang.reference, np.random.default_rng(0), draws)
    mass = policy.mass(lang, lang.reference)
    for n in range(4):
        seen = np.bincount(rows[n], minlength=len(lang.sequences))
        common = mass[n] * draws > 5
        chi2 = ((seen - draws * mass[n]) ** 2 / (draws * mass[n]))[common].sum()
        degrees = common.sum()
        assert abs(chi2 - degrees) < 5 * np.sqrt(2 * degrees)


@each_task
def test_sampling_is_the_inverse_cumulative_distribution(name):
    lang = language(name)
    rows = policy.sample(lang, lang.reference, np.random.default_rng(5), 200)
    uniform = np.random.default_rng(5).random((4, 200))
    for n, cumulative in enumerate(policy.mass(lang, lang.reference).cumsum(axis=1)):
        assert np.array_equal(rows[n], np.searchsorted(cumulative, uniform[n], side="right"))
    some = policy.sample(lang, lang.reference, np.random.default_rng(5), 7, prompts=np.array([3, 1]))
    assert some.shape == (2, 7)


@each_task
def test_a_certain_policy_says_its_greedy_response(name):
    lang = language(name)
    logits = np.log(np.eye(lang.V) + 1e-300)[np.random.default_rng(2).integers(lang.V, size=(4, lang.prefixes))]
    said = policy.greedy(lang, logits)
    assert policy.mass(lang, logits)[np.arange(4), said] == pytest.approx(np.ones(4))
    rows = policy.sample(lang, logits, np.random.default_rng(0), 50)
    assert np.all(rows == said[:, None])


# --- the optimiser ---------------------------------------------------------------------------------------


def test_first_adam_step_is_the_rate_up_the_sign():
    x = np.zeros(3)
    moved, state = adam_ascend(x, np.array([2.0, -1e-3, 0.0]), adam_start(x), 0.05)
    assert moved == pytest.approx([0.05, -0.05, 0.0], rel=1e-4)
    assert state.step == 1


def test_exact_gradient_climbs_to_the_optimum():
    lang = language("toy")
    best, logits = policy.tilted(lang, 0.5), lang.reference
    state = adam_start(logits)
    for step in range(1, 1001):
        gradient = policy.true_gradient(lang, logits, 0.5).total / 4
        logits, state = adam_ascend(logits, gradient, state, 0.05 * cosine(step, 1000, 0.02))
    distance = policy.kl(policy.sequence_log_probs(lang, logits), best.log_probs)
    assert distance.mean() < 1e-6
