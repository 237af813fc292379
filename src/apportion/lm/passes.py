"""Passes over completions: log-probability and entropy of every response token, with gradient or without.

Logits are the largest thing of all (tokens x vocabulary, float32), so they exist for response tokens only, a chunk at
a time, and are worked out again in the backward pass. Log-probabilities carry the temperature and the truncation that
sampled the tokens, and are float32 whatever the weights are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apportion.lm.generate import Completions, Sampling
from apportion.lm.models import LanguageModel
from apportion.lm.packing import Packed, Row, head, hidden
from apportion.lm.products import linear, multiply

CHUNK = 1 << 25
"""Logits that exist at a time (128 MiB in float32)."""
KEPT = 1 << 26
"""Probabilities that a forward pass keeps for its backward pass; beyond these the logits are worked out again."""
SLICE = 4096
"""Tokens of the vocabulary whose weights get their gradient together."""
BLOCK = 1 << 18
"""Logits that one operation goes through at a time on a CPU (1 MiB in float32)."""
_OUT = -1e30  # a logit that cannot be sampled: finite, because 0 times infinity is not 0


class Scores(NamedTuple):
    """logp, entropy: [M] (nats, float32) of each response token, all responses one after another."""

    logp: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Batch:
    """Responses that go through the model together.

    index: [R] of (group, sibling). rows: the same responses, those of one group together.
    """

    index: tuple[tuple[int, int], ...]
    rows: tuple[Row, ...]


def batches(
    completions: Completions, index: Sequence[tuple[int, int]], tokens: int, *, shared: bool = True
) -> Iterator[Batch]:
    """The responses at `index` [R], sorted and cut into batches of about `tokens` tokens; at least one response each.

    shared: siblings share their prompt, so it counts once in a batch (not where rows are padded). A group is then cut
    only where it is larger than a batch, and than twice its prompt: reading a long prompt again costs more.
    """
    held: list[tuple[int, int]] = []
    size = 0
    for unit in _units(sorted(index), shared):
        prompt = len(completions.prompt[unit[0][0]])
        own = [len(completions.tokens[n][g]) - 1 for n, g in unit]
        if held and size + prompt + sum(own) > tokens:
            yield _batch(completions, held)
            held, size = [], 0
        size += prompt
        for response, length in zip(unit, own, strict=True):
            if held and size + length > max(tokens, 2 * prompt * shared):
                yield _batch(completions, held)
                held, size = [], prompt
            held.append(response)
            size += length
    if held:
        yield _batch(completions, held)


def _units(index: Sequence[tuple[int, int]], shared: bool) -> list[list[tuple[int, int]]]:
    """What is kept together if it can be: groups, or single responses where nothing is shared."""
    if not shared:
        return [[i] for i in index]
    return [list(group) for _, group in itertools.groupby(index, key=lambda i: i[0])]


def _batch(completions: Completions, index: Sequence[tuple[int, int]]) -> Batch:
    groups = dict.fromkeys(n for n, _ in index)
    rows = tuple(
        Row(completions.prompt[n], tuple(completions.tokens[n][g] for m, g in index if m == n)) for n in groups
    )
    return Batch(tuple(index), rows)


def score(language_model: LanguageModel, rows: Sequence[Row], sampling: Sampling) -> Scores:
    """Log-probability and entropy of the rows' response tokens under the model now.

    The distribution is `sampling`'s, its truncation worked out from the model's logits now (a token that was
    sampled is never cut off). At temperature 0 that of temperature 1.
    """
    if not language_model.packed:
        return _score_plain(language_model, rows, sampling)
    causal = language_model.causal
    packed = Packed.of(rows, language_model.device)
    state = hidden(causal, packed.ids, packed.positions, packed)[packed.at]
    weight, bias = head(causal)
    return Scores(*_Chosen.apply(state, weight, bias, packed.target, _sampled(sampling)))


def _sampled(sampling: Sampling) -> Sampling:
    return sampling if sampling.temperature else Sampling(max_tokens=sampling.max_tokens)


def _score_plain(language_model: LanguageModel, rows: Sequence[Row], sampling: Sampling) -> Scores:
    """Every response with its own copy of the prompt, padded on the right, through the model's own forward."""
    device = language_model.device
    single = [(row.prompt, r) for row in rows for r in row.responses]
    widest = max(len(p) + len(r) for p, r in single)
    ids = np.full((len(single), widest), language_model.pad_id, np.int64)
    for line, (prompt, response) in zip(ids, single, strict=True):
        line[: len(prompt) + len(response)] = np.concatenate([prompt, response])
    at = np.concatenate([b * widest + len(p) - 1 + np.arange(len(r)) for b, (p, r) in enumerate(single)])
    # A causal model never looks to the right, so padding there needs no mask.
    logits = language_model.model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits
    chosen = logits.flatten(0, 1)[torch.from_numpy(at).to(device)]
    target = torch.from_numpy(np.concatenate([r for _, r in single]).astype(np.int64)).to(device)
    return from_logits(chosen, target, _sampled(sampling))


def from_logits(logits: Tensor, target: Tensor, sampling: Sampling) -> Scores:
    """Log-probability and entropy of target [M] under logits [M, V]; the definition, with PyTorch's own gradient."""
    logits = _truncated(sampling.tempered(logits), target, sampling)
    logp = torch.log_softmax(logits, dim=-1)
    return Scores(torch.gather(logp, 1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1))


def _truncated(logits: Tensor, target: Tensor, sampling: Sampling) -> Tensor:
    least = sampling.threshold(logits.detach())
    if least is None:
        return logits
    least = torch.minimum(least, torch.gather(logits.detach(), 1, target[:, None]))
    return torch.where(logits < least, _OUT, logits)


class _Chosen(torch.autograd.Function):
    """`from_logits(hidden @ weight.T + bias, target, sampling)`, a chunk of logits at a time.

    With p the distribution: d logp = [target] - p, d entropy = -p (log p + entropy), so p is what backward needs.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        logp, entropy = (torch.empty(len(state), device=state.device) for _ in range(2))
        kept: dict[int, Tensor] = {}
        for cut in _chunks(state, weight):
            p, logp[cut], entropy[cut] = _distribution(state[cut], weight, bias, target[cut], sampling)
            if any(ctx.needs_input_grad) and cut.stop * len(weight) <= KEPT:
                kept[cut.start] = p
            del p
        ctx.save_for_backward(state, weight, bias, target, logp, entropy)
        ctx.sampling, ctx.kept = sampling, kept
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_logp: Tensor | None, by_entropy: Tensor | None) -> Any:
        state, weight, bias, target, logp, entropy = ctx.saved_tensors
        needs_state, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_state = torch.empty_like(state) if needs_state else None
        to_weight = torch.zeros_like(weight) if needs_weight else None
        to_bias = torch.zeros_like(bias) if needs_bias else None
        by = [x if x is None else x[:, None] / ctx.sampling.temperature for x in (by_logp, by_entropy)]
        for cut in _chunks(state, weight):
            p = ctx.kept.pop(cut.start, None)  # not kept beyond this: the slope takes its place
            if p is None:
                p = _distribution(state[cut], weight, bias, target[cut], ctx.sampling)[0]
            chunk = (x if x is None else x[cut] for x in by)
            slope, size = _slope(p, logp[cut, None], entropy[cut, None], target[cut, None], *chunk)
            if to_state is not None:
                to_state[cut] = multiply(slope, weight.T).mul_(size)
            scaled = state[cut] * size
            for i in range(0, 0 if to_weight is None else len(to_weight), SLICE):
                part = slice(i, i + SLICE)  # whole, its transpose would take as much memory as the logits
                to_weight[part] += multiply(slope[:, part].T, scaled.T)  # type: ignore[index]
            if to_bias is not None:
                to_bias += (slope.T @ size)[:, 0]
        return to_state, to_weight, to_bias, None, None


def _distribution(
    state: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [R, V] in the weights' dtype, and in float32 logp [R] of the targets and entropy [R]."""
    whole = linear(state, weight, bias)
    logp, entropy = (torch.empty(len(state), device=state.device) for _ in range(2))
    # So few rows at a time that they stay in the processor's cache from one operation to the next.
    rows = max(1, BLOCK // len(weight)) if whole.device.type == "cpu" else len(whole)
    for i in range(0, len(whole), rows):
        cut = slice(i, i + rows)
        logits = _truncated(sampling.tempered(whole[cut]), target[cut], sampling)
        logits = logits.sub_(logits.amax(dim=-1, keepdim=True))
        p = torch.exp(logits)
        total = p.sum(dim=-1)
        lead = total.log()
        logp[cut] = torch.gather(logits, 1, target[cut, None])[:, 0] - lead
        entropy[cut] = lead - torch.linalg.vecdot(p, logits) / total
        torch.div(p, total[:, None], out=p)
        whole[cut] = p
    return whole, logp, entropy


def _slope(
    p: Tensor, logp: Tensor, entropy: Tensor, target: Tensor, by_logp: Tensor | None, by_entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient by the logits as a product of [R, V], in the place of p, and [R, 1]. The rest is given as [R, 1]."""
    if by_entropy is None:
        # p - [target], written rather than added, because it would be rounded where p is nearly 1. What it is times
        # goes with the narrow factor of the products that follow, which spares a pass over the wide one.
        size = torch.zeros_like(logp) if by_logp is None else -by_logp
        return p.scatter_(1, target, torch.expm1(logp).to(p.dtype)), size.to(p.dtype)
    share = p.float()
    slope = torch.special.xlogy(share, share).addcmul_(share, entropy).mul_(-by_entropy)
    if by_logp is not None:
        slope.addcmul_(share, by_logp, value=-1).scatter_add_(1, target, by_logp)
    return slope.to(p.dtype), torch.ones_like(logp, dtype=p.dtype)


def _chunks(state: Tensor, weight: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK // weight.shape[0])
    return (slice(i, min(i + rows, len(state))) for i in range(0, len(state), rows))


@torch.no_grad()
def logprobs(language_model: LanguageModel, completions: Completions, tokens: int = 8192) -> list[list[np.ndarray]]:
    """Log-probabilities [N][G] (float32 arrays as long as the responses) under the model now, without gradient.

    tokens: read at a time, for memory; the result does not depend on it beyond rounding.
    """
    N, G = completions.terminated.shape
    out: list[list[np.ndarray]] = [[np.empty(0, np.float32)] * G for _ in range(N)]
    for batch in batches(completions, list(np.ndindex(N, G)), tokens, shared=language_model.packed):
        logp = score(language_model, batch.rows, completions.sampling).logp.cpu().numpy()
        lengths = [len(completions.tokens[n][g]) for n, g in batch.index]
        for (n, g), part in zip(batch.index, np.split(logp, np.cumsum(lengths)[:-1]), strict=True):
            out[n][g] = part
    return out
