"""Sampling completions: what was asked of the sampler, what it gave, and the sampler that runs in this process.

Each response has a random stream of its own, made from its prompt's seed and its number among the siblings, and one
uniform number is spent a token. So a response does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from apportion.core.errors import ApportionError, InvalidData
from apportion.lm.models import LanguageModel
from apportion.lm.packing import Cache, head
from apportion.lm.products import linear

Seed = int | tuple[int, ...]
FIRST = 1024
"""Tokens among which the edge of top_p is looked for first."""
BLOCK = 256
"""Tokens whose probabilities are summed before the running sum is taken."""


@dataclass(frozen=True)
class Sampling:
    """The distribution that is sampled, and where a response is cut.

    temperature: of the softmax; 0 takes the most probable token. top_k: only the k most probable tokens; 0 for all.
    top_p: only the most probable tokens that together hold this probability. Equal logits at the edge stay in.
    max_tokens: the most tokens of a response, the end token included.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0 <= self.temperature < float("inf"), "0 or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ApportionError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

    def threshold(self, logits: Tensor) -> Tensor | None:
        """The least logit [M, 1] that may be sampled, of tempered logits [M, V]; None where all may."""
        V = logits.shape[-1]
        least = None
        if 0 < self.top_k < V:
            least = torch.topk(logits, self.top_k, dim=-1).values[:, -1:]
            logits = torch.where(logits < least, -torch.inf, logits)
        if self.top_p < 1:
            total = torch.logsumexp(logits, dim=-1, keepdim=True)
            for some in (min(V, FIRST), V):  # a whole vocabulary is sorted only where the first ones do not reach
                order = torch.topk(logits, some, dim=-1).values
                share = torch.exp(order - total)
                reached = torch.cumsum(share, dim=-1)
                if bool((reached[:, -1] >= self.top_p).all()):
                    break
            count = (reached - share < self.top_p).sum(dim=-1, keepdim=True)
            least = torch.gather(order, 1, count - 1)
        return least

    def tempered(self, logits: Tensor) -> Tensor:
        """Logits [M, V] in float32, divided by the temperature (which must not be 0)."""
        return logits.float() if self.temperature == 1 else logits.float() / self.temperature


@dataclass(frozen=True, eq=False)
class Completions:
    """What the sampler gave, on the axes N prompts, G siblings.

    prompt: [N] int arrays. tokens: [N][G] int arrays, the end token included where the response ended.
    logq: [N][G] float arrays of the same lengths, log-probability (nats) under the distribution actually sampled:
        after temperature, top-k and top-p (0 at temperature 0).
    terminated: [N G] bool, ended by a stop id. truncated: [N G] bool, cut at max_tokens.
    sampling: the distribution.

    Raises InvalidData where the lengths do not fit together.
    """

    prompt: list[np.ndarray]
    tokens: list[list[np.ndarray]]
    logq: list[list[np.ndarray]]
    terminated: np.ndarray
    truncated: np.ndarray
    sampling: Sampling

    def __post_init__(self) -> None:
        shape = self.terminated.shape
        if self.truncated.shape != shape or len(shape) != 2 or len(self.prompt) != shape[0]:
            raise InvalidData(
                f"{len(self.prompt)} prompts, terminated {shape} and truncated {self.truncated.shape} do not fit; "
                "they must be [N], [N G] and [N G]"
            )
        for name, rows in (("tokens", self.tokens), ("logq", self.logq)):
            if [len(r) for r in rows] != [shape[1]] * shape[0]:
                raise InvalidData(f"{name} has groups of {[len(r) for r in rows]}; it must be [N][G] = {list(shape)}")
        for n, g in np.ndindex(shape):
            if not len(self.tokens[n][g]) or len(self.tokens[n][g]) != len(self.logq[n][g]):
                raise InvalidData(
                    f"response [n={n}, g={g}] has {len(self.tokens[n][g])} tokens and {len(self.logq[n][g])} "
                    "log-probabilities; it must have one of each or more, and as many"
                )

    @property
    def lengths(self) -> np.ndarray:
        """[N G] tokens of each response."""
        return np.array([[len(r) for r in group] for group in self.tokens])

    def __getitem__(self, groups: slice | Sequence[int] | np.ndarray) -> Completions:
        """The groups of a slice or of some indices."""
        index = np.arange(len(self.prompt))[groups]
        return Completions(
            [self.prompt[n] for n in index],
            [self.tokens[n] for n in index],
            [self.logq[n] for n in index],
            self.terminated[index],
            self.truncated[index],
            self.sampling,
        )

    @staticmethod
    def join(parts: Sequence[Completions]) -> Completions:
        """Groups of several collections of the same sampling, one after another."""
        return Completions(
            [x for part in parts for x in part.prompt],
            [x for part in parts for x in part.tokens],
            [x for part in parts for x in part.logq],
            np.concatenate([part.terminated for part in parts]),
            np.concatenate([part.truncated for part in parts]),
            parts[0].sampling,
        )


class Generator(Protocol):
    """Anything that samples: `functools.partial(generate, language_model)`, or a server elsewhere."""

    def __call__(
        self, prompts: Sequence[np.ndarray], group: int, *, sampling: Sampling, seeds: Sequence[Seed]
    ) -> Completions:
        """`group` responses to each of the prompts [N] (token ids), drawn by the seeds [N]."""
        ...


@torch.no_grad()
def generate(
    language_model: LanguageModel,
    prompts: Sequence[np.ndarray],
    group: int,
    *,
    sampling: Sampling,
    seeds: Sequence[Seed],
    rows: int = 256,
) -> Completions:
    """`group` responses to each of the prompts [N] (token ids), sampled in this process.

    seeds: [N], one a prompt; sibling g draws from the stream (seed, g), whatever else is in the batch.
    rows: responses that are sampled side by side, for memory; whole groups, at least one.

    A prompt is read once for its group; responses that have ended leave the batch.
    Raises ApportionError for an empty prompt or one that, with max_tokens, is longer than the context.

    A greedy companion (ReMax) is a call with group=1 and temperature 0.
    """
    prompts = [np.asarray(p, np.int64) for p in prompts]
    _check(language_model, prompts, group, sampling, seeds)
    draw = _packed if language_model.packed else _plain
    # Prompts of like length together: less padding of keys in the packed way, fewer batches in the plain one.
    order = sorted(range(len(prompts)), key=lambda n: (len(prompts[n]), n))
    some = max(1, rows // group)
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for batch in (order[i : i + some] for i in range(0, len(order), some)):
        streams = [_stream(seeds[n], g, sampling) for n in batch for g in range(group)]
        drawn = draw(language_model, [prompts[n] for n in batch], group, sampling, np.stack(streams))
        found |= {n: drawn[i * group : (i + 1) * group] for i, n in enumerate(batch)}
    tokens = [[t for t, _ in found[n]] for n in range(len(prompts))]
    ended = np.array([[t[-1] in language_model.stop_ids for t in row] for row in tokens]).reshape(-1, group)
    logq = [[q for _, q in found[n]] for n in range(len(prompts))]
    return Completions(prompts, tokens, logq, ended, ~ended, sampling)


def _check(
    language_model: LanguageModel, prompts: Sequence[np.ndarray], group: int, sampling: Sampling, seeds: Sequence[Seed]
) -> None:
    if group < 1:
        raise ApportionError(f"group is {group}; it must be 1 or more")
    if len(seeds) != len(prompts) or not prompts:
        raise ApportionError(f"there are {len(prompts)} prompts and {len(seeds)} seeds; give one or more, and as many")
    context = language_model.context_length
    for n, prompt in enumerate(prompts):
        if not len(prompt):
            raise ApportionError(f"prompt {n} has no tokens; give at least one")
        if context is not None and len(prompt) + sampling.max_tokens > context:
            raise ApportionError(
                f"prompt {n} has {len(prompt)} tokens; with max_tokens {sampling.max_tokens} it is longer than the "
                f"model's context of {context}; shorten the prompt or lower max_tokens"
            )


def _stream(seed: Seed, sibling: int, sampling: Sampling) -> np.ndarray:
    """The uniform numbers [max_tokens] of one response."""
    parts = (seed,) if isinstance(seed, int | np.integer) else tuple(seed)
    return np.random.default_rng([*parts, sibling]).random(sampling.max_tokens)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token [B] for each row of logits [B, V] by inverting the cumulative distribution at `uniform` [B], and its
    log-probability [B] (float32)."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1), torch.zeros(len(logits), device=logits.device)
    logits = sampling.tempered(logits)
    least = sampling.threshold(logits)
    if least is not None:
        logits = torch.where(logits < least, -torch.inf, logits)
    logp = torch.log_softmax(logits, dim=-1)
    token = _invert(logp.exp(), uniform[:, None])
    return token[:, 0], torch.gather(logp, 1, token)[:, 0]


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """The first token [B, 1] at which the running sum of p [B, V] exceeds its share `uniform` [B, 1] of the whole.

    A running sum is slow, so it is taken over blocks of tokens and then inside one; in float64, because the steps of
    a float32 sum over a large vocabulary would swallow rare tokens.
    """
    blocks = torch.nn.functional.pad(p, (0, -p.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    mass = blocks.sum(dim=-1, dtype=torch.float64)
    total = torch.cumsum(mass, dim=-1)
    # Held a little below the sum, so that rounding ends at a token that has a probability.
    at = uniform.clamp(max=1 - 1e-12) * total[:, -1:]
    block = torch.searchsorted(total, at, right=True)
    within = torch.cumsum(blocks[torch.arange(len(p), device=p.device), block[:, 0]], dim=-1, dtype=torch.float64)
    left = at - torch.gather(total - mass, 1, block)
    left = torch.minimum(left, within[:, -1:] * (1 - 1e-12))
    return block * BLOCK + torch.searchsorted(within, left, right=True)


def _packed(
    language_model: LanguageModel, prompts: Sequence[np.ndarray], group: int, sampling: Sampling, streams: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and log-probabilities of the responses [N · G], token by token from a `Cache`."""
    causal, device = language_model.causal, language_model.device
    weight, bias = head(causal)
    stop = torch.tensor(language_model.stop_ids, device=device)
    uniform = torch.from_numpy(streams).to(device)
    B, L = len(streams), sampling.max_tokens
    tokens = torch.full((B, L), language_model.pad_id, dtype=torch.int64, device=device)
    logq = torch.zeros(B, L, device=device)
    length = torch.zeros(B, dtype=torch.int64, device=device)
    cache = Cache(prompts, group, L, device)
    state = cache.fill(causal).repeat_interleave(group, dim=0)
    row = torch.arange(B, device=device)
    done = torch.zeros(B, dtype=torch.bool, device=device)
    for t in range(L):
        token, logp = choose(linear(state, weight, bias), sampling, uniform[row, t])
        tokens[row, t], logq[row, t] = token, logp
        length[row] += ~done
        done = done | torch.isin(token, stop)
        dead = int(done.sum())
        if dead == len(done) or t + 1 == L:
            break
        if dead > len(done) // 16:  # dropping copies the live keys, so not for every single one
            cache.keep(~done)
            row, token, done = row[~done], token[~done], done[~done]
        state = cache.step(causal, token[None])
    ids, logs, lengths = tokens.cpu().numpy(), logq.cpu().numpy(), length.tolist()
    return [(ids[b, :n].copy(), logs[b, :n].copy()) for b, n in enumerate(lengths)]


def _plain(
    language_model: LanguageModel, prompts: Sequence[np.ndarray], group: int, sampling: Sampling, streams: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same through the model's own `generate`, prompts of equal length together (no padding on the left)."""
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for length in sorted({len(p) for p in prompts}):
        chosen = [n for n, p in enumerate(prompts) if len(p) == length]
        ids = np.repeat(np.stack([prompts[n] for n in chosen]), group, axis=0)
        uniform = torch.from_numpy(streams.reshape(len(prompts), group, -1)[chosen].reshape(len(ids), -1))
        processor = _Draw(sampling, uniform.to(language_model.device), length)
        whole = language_model.model.generate(
            input_ids=torch.from_numpy(ids).to(language_model.device),
            attention_mask=torch.ones(ids.shape, dtype=torch.int64, device=language_model.device),
            logits_processor=[processor],
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=list(language_model.stop_ids),
            pad_token_id=language_model.pad_id,
        )
        logq = torch.stack(processor.logq, dim=1).cpu().numpy()
        for response, logs in zip(whole[:, length:].cpu().numpy(), logq, strict=True):
            ends = np.flatnonzero(np.isin(response, language_model.stop_ids))
            n = int(ends[0]) + 1 if len(ends) else len(response)
            out.append((response[:n].copy(), logs[:n].copy()))
    return out


class _Draw:
    """A logits processor that draws by itself and leaves `generate` only the token drawn."""

    def __init__(self, sampling: Sampling, uniform: Tensor, prompt: int) -> None:
        self.sampling, self.uniform, self.prompt = sampling, uniform, prompt
        self.logq: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers.LogitsProcessor."""
        token, logp = choose(scores, self.sampling, self.uniform[:, input_ids.shape[1] - self.prompt])
        self.logq.append(logp)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)


def greedy(sampling: Sampling) -> Sampling:
    """The same limits at temperature 0: the companion rollout of ReMax."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
