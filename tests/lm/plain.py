"""The plain way, to hold the engine against: each response with its prompt, padded, whole logits, eager attention."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from apportion.lm import tiny
from apportion.lm.generate import Completions, Sampling, generate
from apportion.lm.learn import Learner, rollouts

PROMPTS = ("1+2=", "13+40=", "7")
SHORT = Sampling(max_tokens=9)


def model(seed=0, **shape):
    """A tiny model whose logits are not all alike (a random one's nearly are), so that wrong attention shows."""
    made = tiny.model(**({"width": 32, "heads": 4, "key_heads": 2, "seed": seed} | shape))
    with torch.no_grad():
        for p in made.model.parameters():
            if p.ndim > 1:
                p.mul_(5.0)
    return made


def prompts(made, texts=PROMPTS):
    return [np.array(made.tokenizer(text)["input_ids"]) for text in texts]


def sample(made, group=4, sampling=SHORT, seed=0):
    texts = prompts(made)
    return generate(made, texts, group, sampling=sampling, seeds=[(seed, n) for n in range(len(texts))])


def moved(made, by=0.02, seed=9):
    """The same model with its weights pushed a little, so that ratios are not 1."""
    other = replace(made, model=copy.deepcopy(made.model))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for p in other.model.parameters():
            p.add_(by * p.abs().mean() * torch.randn_like(p))
    return other


def book(completions, seed=0, **fields):
    """Rollouts with made-up rewards, and a reference near the sampler."""
    rng = np.random.default_rng(seed)
    near = [[q + 0.2 * rng.normal(size=len(q)) for q in group] for group in completions.logq]
    shape = completions.terminated.shape
    given = {"logref": near, "greedy_return": rng.random(shape[0])} | fields
    return rollouts(completions, rng.integers(0, 2, shape) + rng.normal(size=shape) / 9, **given)


def logprobs(module, completions: Completions):
    """Log-probabilities and entropies [N G T] of the responses, with gradient; 0 where there is no token."""
    N, G = completions.terminated.shape
    T = int(completions.lengths.max())
    plain = module
    plain.set_attn_implementation("eager")
    for layer in plain.modules():
        layer.__class__ = getattr(layer, "instead_of", type(layer))
    flat = [(completions.prompt[n], completions.tokens[n][g]) for n in range(N) for g in range(G)]
    longest = max(len(p) for p, _ in flat)
    ids, mask = (torch.zeros(N * G, longest + T, dtype=torch.int64) for _ in range(2))
    for b, (p, r) in enumerate(flat):  # padded on both sides, so that responses start in one column
        row = torch.tensor(np.concatenate([p, r]))
        ids[b, longest - len(p) : longest + len(r)] = row
        mask[b, longest - len(p) : longest + len(r)] = 1
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = plain(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
    logits = logits[:, longest - 1 : -1] / completions.sampling.temperature
    token = ids[:, longest:]
    chosen = logits.gather(2, token[..., None])
    ranked = logits.sort(dim=-1, descending=True).values
    if completions.sampling.top_k:
        edge = ranked[..., completions.sampling.top_k - 1, None]
        logits = logits.masked_fill((logits < edge) & (logits < chosen), -1e9)
    if completions.sampling.top_p < 1:
        ranked = logits.sort(dim=-1, descending=True).values
        before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
        edge = torch.where(before < completions.sampling.top_p, ranked, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill((logits < edge) & (logits < chosen), -1e9)
    logp = logits.log_softmax(-1)
    there = mask[:, longest:]
    entropy = -(logp.exp() * logp).sum(-1) * there
    return (logp.gather(2, token[..., None])[..., 0] * there).reshape(N, G, T), entropy.reshape(N, G, T)


def gradient(made, loss):
    """Gradients by name of a scalar loss(logp [N G T], entropy [N G T]) of the plain way."""
    module = copy.deepcopy(made.model)
    module.zero_grad()
    loss(module).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def engine_gradient(method, made, completions, rolled, **options):
    """Gradients by name that one collection leaves in the engine, before any step."""
    learner = Learner(method, made, made, **options)
    return gathered(learner, completions, rolled)


def gathered(learner, completions, rolled):
    """Gradients by name of a learner's step, which is not taken."""
    found = {}
    learner.optimiser.move = lambda rate: (
        found.update((k, x.clone()) for k, x in learner.optimiser.gradients.items()) or 0.0
    )
    learner.step(completions, rolled)
    return found


def assert_same(found, wanted, near=1e-5):
    """Equal relative to the largest entry of each parameter's gradient."""
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name] is not None, name
        size = float(x.abs().max())
        assert size > 0, f"{name}: a gradient of 0 shows nothing"
        assert float((found[name] - x).abs().max()) <= near * size, name
