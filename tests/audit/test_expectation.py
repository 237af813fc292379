"""The audit's moments against brute force over all tuples of siblings, and against sampling."""

from itertools import product

import numpy as np
import pytest

from apportion.audit.expectation import REPLICATES, expected_update, moments, true_gradient, unit
from apportion.audit.replicate import replicate, updates
from apportion.audit.report import policy_of
from apportion.audit.tables import prepare, tabulate
from apportion.core.catalogue import METHODS, dapo, dpo, dr_grpo, gpg, grpo, ppo_rlhf, raft, reinforce, rloo
from apportion.core.errors import ApportionError, InvalidMethod
from apportion.core.parts import KL, BatchMean, DecisionMean, GroupStd, LeaveOneOut, SequenceMean, SiblingMean
from apportion.core.weigh import advantages, weights
from apportion.toy import policy
from apportion.toy.language import RECIPES, Recipe, language

TINY = {
    "tiny": Recipe(V=3, L=2, targets=(1, 0), eos=None, seed=7, concentration=1.0),
    "tiny-eos": Recipe(V=3, L=3, targets=(1, 0), eos=2, seed=7, concentration=1.0),
}


@pytest.fixture(params=TINY)
def lang(request, monkeypatch):
    monkeypatch.setitem(RECIPES, request.param, TINY[request.param])
    return language(request.param)


def off_reference(lang):
    return lang.reference + np.random.default_rng(3).normal(size=lang.reference.shape)


def brute_force(method, lang, logits, G):
    """Expected update, variance and silence, from every tuple of G siblings of every prompt, one by one."""
    method = prepare(method, G)
    G, N, S = method.sampler.group, lang.prompts, len(lang.sequences)
    tables = tabulate(method, lang, logits)
    tuples = np.array(list(product(range(S), repeat=G)))
    rows, prompts = np.tile(tuples, (N, 1)), np.repeat(np.arange(N), len(tuples))
    chance = tables.mass[prompts[:, None], rows].prod(axis=1)
    book = tables.book(prompts, rows, chance / N)
    ledger = weights(method, advantages(method, book), tables.logp[prompts[:, None], rows])
    times = unit(method, tables) / chance
    w = np.asarray(ledger.w) * times[:, None, None]
    cuts = [slice(i, i + 1) for i in range(len(rows))]
    each = np.stack([policy.score_sum(lang, logits, w[i], rows[i], prompts[i, None]) for i in cuts])
    mean = np.einsum("r,rnkv->nkv", chance, each)
    variance = chance @ (each**2).sum(axis=(1, 2, 3)) - (mean**2).sum()
    return mean, variance


CASES = {
    "success counts": grpo.set("kl.beta", 0.0),
    "with k3 in the loss": grpo.set("kl.beta", 0.5),
    "with k2 in the loss, by length": dr_grpo.replace(kl=KL("loss", "k2", 0.5), aggregate=SequenceMean()),
    "one constant": dr_grpo,
    "affine": rloo.set("kl.beta", 0.5),
    "affine, by length": rloo.replace(kl=KL("reward", "k1", 0.5), aggregate=SequenceMean()),
    "affine, whitened over the batch": METHODS["reinforce_pp_baseline"].set("kl.beta", 0.5),
    "leave-one-out, whitened": METHODS["reinforce_pp_baseline"].replace(baseline=LeaveOneOut()),
    "the filter over the batch": dapo,
    "best of the group": raft,
    "siblings still alive": gpg,
    "siblings still alive, without the own": gpg.replace(
        baseline=SiblingMean(leave_one_out=True), aggregate=SequenceMean()
    ),
    "spread of shaped returns": grpo.replace(kl=KL("reward", "k1", 0.5), scale=GroupStd(0, 1e-8)),
    "process": METHODS["grpo_process"],
    "alone": reinforce.replace(kl=KL("reward", "k1", 0.5)),
    "alone, batch mean": reinforce.replace(baseline=BatchMean(), aggregate=DecisionMean()),
    "critic": ppo_rlhf.set("kl.beta", 0.5),
}


@pytest.mark.parametrize("G", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_moments_equal_brute_force(lang, case, G):
    if len(lang.sequences) ** G > 4000:
        pytest.skip("too many tuples")
    method, logits = CASES[case], off_reference(lang)
    found = moments(method, lang, logits, G)
    mean, variance = brute_force(method, lang, logits, G)
    assert "replicated (n" not in found.how.split(";")[0]
    assert found.update == pytest.approx(mean, rel=1e-10, abs=1e-12)
    if "variance replicated" in found.how:
        assert found.variance == pytest.approx(variance, rel=0.15)
    else:
        assert found.variance == pytest.approx(variance, rel=1e-9)


def test_pairs_equal_brute_force(lang):
    """Over ordered pairs and both labels."""
    logits, method = off_reference(lang), prepare(dpo.set("trust.beta", 2.0), 8)
    tables, S, total = tabulate(method, lang, logits), len(lang.sequences), 0.0
    pairs = np.array(list(product(range(S), repeat=2)))
    for n in range(lang.prompts):
        who, reward = np.full(len(pairs), n), lang.reward[n][pairs]
        chance = tables.mass[n][pairs].prod(axis=1)
        for label in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):
            won = 1 / (1 + np.exp(-(reward * (2 * label - 1)).sum(axis=1)))
            book = tables.book(who, pairs, chance * won)
            paid = np.zeros_like(book.reward)
            np.put_along_axis(
                paid, lang.length[pairs][..., None] - 1, np.broadcast_to(label, pairs.shape)[..., None], -1
            )
            book = type(book)(**{**book.__dict__, "reward": paid})
            w = np.asarray(weights(method, advantages(method, book), tables.logp[who[:, None], pairs]).w)
            total = total + policy.score_sum(lang, logits, w * (chance * won).sum(), pairs, who[:, None])
    found = moments(method, lang, logits)
    assert found.update == pytest.approx(total / lang.prompts, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo", "dpo", "raft", "ppo_rlhf"])
def test_sampling_agrees_within_its_interval(name):
    lang = language("toy")
    logits = policy_of("perturbed", lang)
    method = prepare(METHODS[name], 8)
    tables = tabulate(method, lang, logits)
    blocks = updates(tables, replicate(method, tables, REPLICATES, seed=1)) * unit(method, tables) / lang.prompts
    exact = expected_update(METHODS[name], lang, logits, 8)
    along = (blocks * exact).sum(axis=(1, 2, 3)) / (exact**2).sum()
    error = along.std(ddof=1) / np.sqrt(len(along))
    assert abs(along.mean() - 1) < 4 * error
    variance = (REPLICATES / len(blocks)) * ((blocks - exact) ** 2).sum(axis=(1, 2, 3))
    spread = variance.std(ddof=1) / np.sqrt(len(variance))
    assert abs(variance.mean() - moments(METHODS[name], lang, logits, 8).variance) < 5 * spread + 0.01 * variance.mean()


def test_the_gradient_is_of_each_methods_own_objective():
    lang = language("toy")
    logits = policy_of("perturbed", lang)
    assert true_gradient(reinforce, lang, logits) == pytest.approx(policy.true_gradient(lang, logits).reward / 4)
    shaped = true_gradient(rloo.set("kl.beta", 0.5), lang, logits)
    assert shaped == pytest.approx(policy.true_gradient(lang, logits, 0.5).total / 4)
    at_teacher = true_gradient(METHODS["distill"], lang, policy.tilted(lang, 0.5).logits)
    assert np.abs(at_teacher).max() < 1e-12


def test_what_cannot_be_evaluated_is_refused_by_name():
    lang = language("toy")
    with pytest.raises(ApportionError, match=r"temperature is 0\.5"):
        moments(reinforce.set("sampler.temperature", 0.5), lang, lang.reference)
    with pytest.raises(ApportionError, match="DecisionMean"):
        moments(dpo.replace(aggregate=DecisionMean()), lang, lang.reference)
    with pytest.raises(InvalidMethod, match="group size is 1"):
        moments(grpo, lang, lang.reference, 1)


def test_replication_says_so_and_gives_intervals():
    lang = language("toy")
    method = grpo.replace(kl=KL("reward", "k1", 0.5))
    found = moments(method, lang, policy_of("perturbed", lang), 8)
    assert found.how.startswith("replicated (n=")
    assert found.blocks.shape[1:] == lang.reference.shape
