"""Sharing prompts, packing, cutting, skipping and recomputing leave the gradient as the plain way has it, to 1e-5.

And the gradient of every published surrogate, differentiated as its paper has it through the plain way, is ours.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from apportion import methods
from apportion.core.parts import KL, Constant, NoKL
from apportion.core.sampler import Sampler
from apportion.core.weigh import advantages, weights
from apportion.lm import learn, packing, passes
from apportion.lm.generate import Completions, Sampling
from apportion.lm.learn import Learner, rollouts
from apportion.lm.packing import Row
from lm import plain


@pytest.fixture(scope="module")
def sampler():
    return plain.model()


@pytest.fixture(scope="module")
def completions(sampler):
    """Prompts of several lengths, responses of several lengths, one of a single token."""
    several = replace(sampler, stop_ids=(2, 20, 33, 50, 61))
    return plain.sample(several, 4)


def weighted(method, completions, rolled):
    """The plain way's loss: w worked out on its own log-probabilities, then the one loss line."""

    def loss(module):
        logp, entropy = plain.logprobs(module, completions)
        w = weights(method, advantages(method, rolled), logp.detach().double().numpy()).w
        bonus = method.entropy * (torch.tensor(rolled.mask / rolled.mask.sum()) * entropy).sum()
        return -(torch.tensor(w) * logp).sum() - bonus

    return loss


WAYS = {
    "as it is": {},
    "batches as small as they get": {"tokens": 1},
    "batches that split groups": {"tokens": 25},
    "checkpointing": {"checkpointing": True},
    "the trainer's own log-probabilities": {"old": "trainer"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_gradient_is_the_plain_ways(sampler, completions, way, packed):
    """Prefix sharing, packing, micro-batches, checkpointing: nothing of it moves the gradient."""
    rolled = plain.book(completions)
    made = replace(sampler, packed=packed, model=copy.deepcopy(sampler.model))
    found = plain.engine_gradient(methods.dr_grpo, made, completions, rolled, **WAYS[way])
    plain.assert_same(found, plain.gradient(sampler, weighted(methods.dr_grpo, completions, rolled)))


@pytest.mark.parametrize("sampling", [Sampling(0.6, max_tokens=9), Sampling(1.4, top_k=6, max_tokens=9),
                                      Sampling(0.9, top_p=0.7, max_tokens=9)], ids=str)  # fmt: skip
@pytest.mark.parametrize("chunk", [90, 1 << 24], ids=["a row of logits at a time", "all logits at once"])
@pytest.mark.parametrize("kept", [0, 2000, 1 << 24], ids=["worked out again", "some kept", "kept"])
@pytest.mark.parametrize("entropy", [0.0, 0.3], ids=["", "entropy"])
def test_temperature_truncation_and_chunks(sampler, sampling, chunk, kept, entropy, monkeypatch):
    """cases.md 45: log-probabilities carry the temperature; with it the entropy bonus, whose gradient is by hand."""
    for name, value in {"CHUNK": chunk, "KEPT": kept, "BLOCK": 200, "SLICE": 40}.items():
        monkeypatch.setattr(passes, name, value)
    c = plain.sample(sampler, 4, sampling)
    method = methods.dr_grpo.replace(entropy=entropy)
    rolled = plain.book(c)
    found = plain.engine_gradient(method, replace(sampler, model=copy.deepcopy(sampler.model)), c, rolled)
    plain.assert_same(found, plain.gradient(sampler, weighted(method, c, rolled)))


@pytest.mark.parametrize("piece", [1, 7, 512])
@pytest.mark.parametrize("copies", [0, 100], ids=["one after another", "side by side"])
def test_the_attention_in_pieces(sampler, completions, piece, copies, monkeypatch):
    monkeypatch.setattr(packing, "PIECE", piece)
    monkeypatch.setattr(packing, "COPIES", copies)
    rolled = plain.book(completions)
    made = replace(sampler, model=copy.deepcopy(sampler.model))
    found = plain.engine_gradient(methods.grpo, made, completions, rolled)
    plain.assert_same(found, plain.gradient(sampler, weighted(methods.grpo, completions, rolled)))


def test_a_packed_row_holds_every_prompt_once_and_no_padding(completions):
    rows = [Row(p, tuple(r)) for p, r in zip(completions.prompt, completions.tokens, strict=True)]
    packed = packing.Packed.of(rows, torch.device("cpu"))
    once = sum(len(p) for p in completions.prompt) + int((completions.lengths - 1).sum())
    assert packed.ids.shape == (1, once)
    assert len(packed.at) == completions.lengths.sum()


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, [1] * 8 + [4]), (30, [2, 2, 3, 1, 4]), (70, [4, 4, 4]), (10_000, [12])]
)
def test_batches_keep_groups_together_where_they_can(tokens, sizes):
    """A long prompt is not read again for each of its short responses, however small the budget."""
    prompts, short = [np.arange(n) for n in (9, 4, 40)], [[np.arange(n) for n in (14, 7, 7, 7)]] * 3
    made = Completions(prompts, short, short, np.ones((3, 4), bool), np.zeros((3, 4), bool), Sampling(max_tokens=14))
    index = list(np.ndindex(3, 4))
    cut = list(passes.batches(made, index, tokens))
    assert [len(b.index) for b in cut] == sizes
    assert [i for b in cut for i in b.index] == index
    assert all(sum(len(r.responses) for r in b.rows) == len(b.index) for b in cut)
    assert [len(b.index) for b in passes.batches(made, index, 1, shared=False)] == [1] * 12


def test_responses_of_no_weight_go_through_no_pass(sampler, completions, monkeypatch):
    """Groups whose siblings agree are skipped, and the gradient is that of passing everything."""
    reward = np.array([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    rolled = rollouts(completions, reward)
    seen = []
    monkeypatch.setattr(learn, "score", lambda m, rows, s: seen.append(len(rows)) or passes.score(m, rows, s))
    made = replace(sampler, model=copy.deepcopy(sampler.model))
    found = plain.engine_gradient(methods.dr_grpo, made, completions, rolled)
    assert seen == [1]
    plain.assert_same(found, plain.gradient(sampler, weighted(methods.dr_grpo, completions, rolled)))


@pytest.mark.parametrize("name", ["gspo", "cispo", "dr_grpo"])
def test_minibatches_of_a_collection_add_up_to_it(sampler, completions, name):
    """Without a step in between, the cuts' gradients are those of the whole, times their number."""
    method = getattr(methods, name)
    rolled = plain.book(completions)
    for cuts in (2, 12, 50):
        sampled = method.sampler.replace(minibatches=cuts)
        made = replace(sampler, model=copy.deepcopy(sampler.model))
        found = plain.engine_gradient(method.replace(sampler=sampled), made, completions, rolled)
        parts = min(cuts, 12)
        wanted = plain.gradient(sampler, weighted(method, completions, rolled))
        plain.assert_same(found, {k: parts * x for k, x in wanted.items()})


def test_an_adapter_gets_the_gradient_and_its_absence_is_the_reference(sampler, completions):
    from apportion.lm.models import wrap

    made = wrap(copy.deepcopy(sampler.model), sampler.tokenizer, lora={"r": 4, "target_modules": ["q_proj", "up_proj"]})
    with torch.no_grad():
        for name, p in made.model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    learner = Learner(methods.grpo, made)
    with pytest.raises(AssertionError):  # the adapter does something
        assert_close(learner.old_logprobs(completions), learner.reference_logprobs(completions))
    assert_close(learner.reference_logprobs(completions), passes.logprobs(sampler, completions))
    rolled = plain.book(completions, logref=learner.reference_logprobs(completions))
    found = plain.gathered(learner, completions, rolled)
    assert all("lora_" in name for name in found)
    merged = copy.deepcopy(made.model)
    loss = weighted(methods.grpo, completions, rolled)
    merged.zero_grad()
    merged.base_model.model.set_attn_implementation("eager")
    merged.set_attn_implementation = lambda kind: None
    loss(merged).backward()
    plain.assert_same(found, {name: p.grad for name, p in merged.named_parameters() if p.requires_grad})


def assert_close(a, b):
    for x, y in zip([t for g in a for t in g], [t for g in b for t in g], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


# --- published surrogates, as their papers write them, through the plain way; m is the mask, R the returns [N G 1] ---


def seq_mean(x, m):
    return ((m * x).sum(-1) / m.sum(-1)).mean()


def clipped(rho, A, low, high):
    return torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)


def centred(R, std):
    A = R - R.mean(1, keepdim=True)
    return A / (R.std(1, correction=0, keepdim=True) + 1e-6) if std else A


def published_grpo(logp, logq, logref, m, R, L):
    d = logref - logp
    return -seq_mean(clipped(torch.exp(logp - logq), centred(R, True), 0.2, 0.2) - 0.04 * (torch.exp(d) - 1 - d), m)


def published_dr_grpo(logp, logq, logref, m, R, L):
    return -(m * clipped(torch.exp(logp - logq), centred(R, False), 0.2, 0.2)).sum(-1).mean() / L


def published_gspo(logp, logq, logref, m, R, L):
    s = torch.exp((m * (logp - logq)).sum(-1, keepdim=True) / m.sum(-1, keepdim=True))
    return -clipped(s, centred(R, True), 0.02, 0.03).mean()


def published_cispo(logp, logq, logref, m, R, L):
    weight = torch.exp(logp - logq).clamp(max=1.05).detach()
    return -(m * weight * centred(R, True) * logp).sum() / m.sum()


# The bands of gspo and cispo are set where a moved policy of this size meets them on both sides.
PUBLISHED = {
    "grpo": (methods.grpo, published_grpo),
    "dr_grpo": (methods.dr_grpo, published_dr_grpo),
    "gspo": (methods.gspo.set("trust.low", 0.02).set("trust.high", 0.03).set("sampler.minibatches", 1), published_gspo),
    "cispo": (methods.cispo.set("trust.high", 1.05).set("sampler.minibatches", 1), published_cispo),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_gradient_is_the_published_surrogates(sampler, completions, name):
    method, surrogate = PUBLISHED[name]
    made = plain.moved(sampler)
    rolled = plain.book(completions)
    fields = [torch.tensor(getattr(rolled, f)) for f in ("logq", "logref")]
    m, R = torch.tensor(rolled.mask).double(), torch.tensor(rolled.reward).sum(-1, keepdim=True)

    def loss(module):
        logp = plain.logprobs(module, completions)[0].double()
        assert float((logp - fields[0]).detach().abs().max()) > 0.05, "the policy has not moved: the clip is not met"
        return surrogate(logp, *fields, m, R, rolled.horizon)

    wanted = plain.gradient(made, loss)
    plain.assert_same(plain.engine_gradient(method, made, completions, rolled), wanted, near=2e-5)


def test_a_mask_of_truncated_responses_teaches_nothing_from_them(sampler):
    """DAPO's overlong filtering: their reward stays in the baseline (cases.md 32 when there is nothing else)."""
    several = replace(sampler, stop_ids=(2, 20, 33, 50, 61))
    c = plain.sample(several, 4)
    assert c.truncated.any()
    assert c.terminated.any()
    reward = np.random.default_rng(0).normal(size=c.terminated.shape)
    rolled = rollouts(c, reward, mask_truncated=True)
    made = replace(sampler, model=copy.deepcopy(sampler.model))
    found = plain.engine_gradient(methods.dr_grpo, made, c, rolled)
    plain.assert_same(found, plain.gradient(sampler, weighted(methods.dr_grpo, c, rolled)))
    cut = replace(c, truncated=np.ones((3, 4), bool), terminated=np.zeros((3, 4), bool))
    signals = Learner(methods.dr_grpo, made).step(cut, rollouts(cut, reward, mask_truncated=True))
    assert (signals.updates, signals.live, signals.grad_norm) == (0, 0.0, 0.0)


def test_kl_in_the_loss_pulls_on_groups_that_agree(sampler, completions):
    """cases.md 51: without a difference in reward the KL's gradient is still there."""
    method = methods.dr_grpo.replace(kl=KL("loss", "k3", beta=0.1), aggregate=Constant())
    rolled = plain.book(completions, seed=1)
    rolled = replace(rolled, reward=np.where(rolled.reward != 0, 1.0, 0.0))
    made = replace(sampler, model=copy.deepcopy(sampler.model))
    found = plain.engine_gradient(method, made, completions, rolled)
    plain.assert_same(found, plain.gradient(sampler, weighted(method, completions, rolled)))
    none = method.replace(kl=NoKL(), sampler=Sampler(group=4))
    assert Learner(none, made).step(completions, rolled).updates == 0
