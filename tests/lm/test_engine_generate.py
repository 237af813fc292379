"""Sampling: what transformers would say, the log-probability of what was sampled, streams that nobody disturbs."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from apportion.core.errors import ApportionError, InvalidData
from apportion.lm.generate import Completions, Sampling, _invert, choose, generate, greedy
from lm import plain


@pytest.fixture(scope="module")
def made():
    return plain.model()


KINDS = [Sampling(max_tokens=9), Sampling(0.7, max_tokens=9), Sampling(1.3, top_k=5, max_tokens=9),
         Sampling(0.9, top_p=0.6, max_tokens=9), Sampling(1.0, 0.8, 20, 9)]  # fmt: skip


def test_greedy_is_what_transformers_generates(made):
    reference = copy.deepcopy(made.model)
    reference.set_attn_implementation("eager")
    texts = plain.prompts(made, ("1+2=", "13+40=", "7", "99*3=", "ab", "q"))
    free = generate(made, texts, 1, sampling=greedy(Sampling(max_tokens=20)), seeds=range(6))
    stops = [2, int(free.tokens[0][0][6]), int(free.tokens[1][0][3])]
    several = replace(made, stop_ids=tuple(stops))
    found = generate(several, texts, 1, sampling=greedy(Sampling(max_tokens=20)), seeds=range(6))
    for n, prompt in enumerate(texts):
        ids = torch.tensor(prompt)[None]
        wanted = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
                                    eos_token_id=stops, pad_token_id=0)  # fmt: skip
        assert found.tokens[n][0].tolist() == wanted[0, len(prompt) :].tolist()
    assert found.terminated.sum() >= 2, "no response met one of several end ids"
    assert not found.logq[0][0].any(), "at temperature 0 what is sampled has probability 1"


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_logq_is_the_log_probability_under_what_was_sampled(made, sampling):
    c = plain.sample(made, 4, sampling)
    wanted, _ = plain.logprobs(copy.deepcopy(made.model), c)
    for n, g in np.ndindex(3, 4):
        assert c.logq[n][g] == pytest.approx(wanted[n, g, : len(c.tokens[n][g])].detach().numpy(), abs=1e-4)


def test_tokens_come_as_often_as_their_probability_says():
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0, -40.0]])
    uniform = torch.linspace(0.5e-4, 1 - 0.5e-4, 10_000, dtype=torch.float64)
    for sampling in (Sampling(), Sampling(0.5), Sampling(top_k=2), Sampling(top_p=0.7), Sampling(top_p=0.1)):
        token, logp = choose(logits.expand(10_000, -1), sampling, uniform)
        share = np.bincount(token, minlength=5) / 10_000
        p = np.exp(np.array([2.0, 1.0, 0.5, -1.0, -40.0]) / sampling.temperature)
        kept = {0: 5, 2: 2}[sampling.top_k] if sampling.top_p == 1 else (2 if sampling.top_p == 0.7 else 1)
        p = np.where(np.arange(5) < kept, p, 0) / p[:kept].sum()
        assert share == pytest.approx(p, abs=2e-4)
        assert logp[0].item() == pytest.approx(np.log(p[0]), abs=1e-6)


def test_a_draw_is_the_inverse_of_the_running_sum():
    """Over a vocabulary of many blocks, at the ends of the unit interval, and never a token of probability 0."""
    rng = np.random.default_rng(0)
    p = torch.from_numpy(rng.dirichlet(np.full(1500, 0.02), 400)).float() * (torch.rand(400, 1500) < 0.5)
    p[:100, 700:] = 0.0
    uniform = torch.from_numpy(rng.random((400, 1)))
    uniform[:50], uniform[50:100] = 0.0, 1 - 2.0**-53
    token = _invert(p, uniform)[:, 0]
    total = torch.cumsum(p.double(), dim=-1)
    assert (p[torch.arange(400), token] > 0).all()
    at = (uniform * total[:, -1:])[:, 0]
    near = 1e-9
    assert (total[torch.arange(400), token] > at - near).all()
    assert (total[torch.arange(400), token] - p[torch.arange(400), token] <= at + near).all()


def test_the_edge_of_top_p_is_found_however_far_it_is(monkeypatch):
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 400))).float()
    found = [Sampling(top_p=p).threshold(logits) for p in (0.05, 0.5, 0.99)]
    monkeypatch.setattr("apportion.lm.generate.FIRST", 7)
    for p, edge in zip((0.05, 0.5, 0.99), found, strict=True):
        assert torch.equal(Sampling(top_p=p).threshold(logits), edge)
        inside = torch.where(logits >= edge, logits, -torch.inf).logsumexp(-1) - logits.logsumexp(-1)
        beyond = torch.where(logits > edge, logits, -torch.inf).logsumexp(-1) - logits.logsumexp(-1)
        assert (inside.exp() >= p - 1e-5).all()
        assert (beyond.exp() < p + 1e-5).all()


def test_a_response_does_not_depend_on_what_else_is_in_the_batch(made):
    texts = plain.prompts(made, ("1+2=", "13+40=", "7", "1+2=", "5*5*5*5="))
    seeds = [5, 6, 7, 8, (9, 1)]
    whole = generate(made, texts, 6, sampling=plain.SHORT, seeds=seeds)
    for n in range(5):
        alone = generate(made, [texts[n]], 2, sampling=plain.SHORT, seeds=[seeds[n]])
        assert [t.tolist() for t in alone.tokens[0]] == [t.tolist() for t in whole.tokens[n][:2]]
        assert np.concatenate(alone.logq[0]) == pytest.approx(np.concatenate(whole.logq[n][:2]), abs=1e-5)
    few = generate(made, texts, 6, sampling=plain.SHORT, seeds=seeds, rows=6)
    assert [[t.tolist() for t in g] for g in few.tokens] == [[t.tolist() for t in g] for g in whole.tokens]


def test_siblings_differ_and_so_does_a_prompt_that_comes_twice(made):
    """cases.md 24 and 11: one seed gives distinct streams; equal prompts of two requests are two groups."""
    same = plain.prompts(made, ("1+2=", "1+2="))
    c = generate(made, same, 6, sampling=plain.SHORT, seeds=[7, 8])
    assert len({tuple(t) for group in c.tokens for t in group}) == 12
    again = generate(made, same, 6, sampling=plain.SHORT, seeds=[7, 8])
    assert [[t.tolist() for t in g] for g in again.tokens] == [[t.tolist() for t in g] for g in c.tokens]


def test_a_response_ends_at_any_of_the_end_ids_and_keeps_it(made):
    """cases.md 46."""
    several = replace(made, stop_ids=(2, 20, 33, 50))
    c = plain.sample(several, 16, Sampling(max_tokens=30))
    assert c.terminated.any()
    assert c.truncated.any()
    assert (c.terminated != c.truncated).all()
    for n, g in np.ndindex(c.terminated.shape):
        ends = np.isin(c.tokens[n][g], several.stop_ids)
        assert ends[-1] == c.terminated[n, g]
        assert not ends[:-1].any()
        assert len(ends) == 30 or c.terminated[n, g]


def test_the_models_own_forward_samples_the_same(made):
    texts = plain.prompts(made)
    packed, padded = (
        generate(m, texts, 4, sampling=Sampling(0.8, 0.9, 30, 9), seeds=[1, 2, 3])
        for m in (replace(made, stop_ids=(2, 20, 33)), replace(made, stop_ids=(2, 20, 33), packed=False))
    )
    for a, b in zip(packed.tokens, padded.tokens, strict=True):
        assert [t.tolist() for t in a] == [t.tolist() for t in b]
    assert np.concatenate([q for g in packed.logq for q in g]) == pytest.approx(
        np.concatenate([q for g in padded.logq for q in g]), abs=1e-4
    )


def test_groups_are_taken_and_joined(made):
    c = plain.sample(made)
    back = Completions.join([c[:1], c[[2, 1]]])
    assert [len(p) for p in back.prompt] == [len(c.prompt[n]) for n in (0, 2, 1)]
    assert back.tokens[1] is c.tokens[2]
    with pytest.raises(InvalidData, match=r"n=0, g=1"):
        replace(c, logq=[[q[: len(q) - (g == 1)] for g, q in enumerate(row)] for row in c.logq])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1]}, "3 prompts and 1 seeds"),
        ({"group": 0}, "group is 0"),
        ({"sampling": Sampling(max_tokens=600)}, "longer than the model's context of 512"),
        ({"prompts": [np.array([], int)] * 3}, "prompt 0 has no tokens"),
    ],
)
def test_what_cannot_be_sampled_is_refused(made, change, message):
    asked = {"prompts": plain.prompts(made), "group": 2, "sampling": plain.SHORT, "seeds": [1, 2, 3]} | change
    with pytest.raises(ApportionError, match=message):
        generate(made, asked.pop("prompts"), asked.pop("group"), **asked)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_tokens": 0}])
def test_a_distribution_that_is_none_is_refused(wrong):
    with pytest.raises(ApportionError, match=next(iter(wrong))):
        Sampling(**wrong)
