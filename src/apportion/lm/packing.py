"""Packed rows: the linear layers see tokens without padding, the attention sees groups that share their prompt.

A model is always called with one row [1, S]. What belongs together in it, a `plan` says: `Packed` for a pass over whole
groups (prompt once, then its responses, each seeing the prompt and itself), `Cache` for token-by-token sampling. The
plan travels through the model's keyword arguments to `attention`, which transformers looks up by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from apportion.lm.products import linear

NAME = "apportion"
PIECE = 512
"""Response tokens of a group whose attention is worked out together; siblings in one piece cost masked products."""
PLAIN = 1 << 18
"""Products of a query with a key up to which the attention of 16-bit numbers on a CPU is written out."""
COPIES = 4
"""How many times a group's keys siblings may hold side by side, each with its prompt's: speed for memory."""


class Plan(Protocol):
    """Who sees whom in a packed row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention output [1, H, S, D] from query [1, H, S, D] and key, value [1, K, S, D], K key heads."""
        ...


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: Plan | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls under `NAME`: the plan's attention, or PyTorch's own where there is no plan."""
    if plan is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if options.get("softcap") is not None:
        raise ValueError("packed attention has no soft cap")
    return plan.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class Row:
    """A prompt [P] and responses [L_j] of its group, token ids."""

    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the model reads: the last one of a response predicts nothing and is left out."""
        return len(self.prompt) + sum(len(r) - 1 for r in self.responses)


@dataclass(frozen=True)
class Piece:
    """Queries [start, stop) of a packed row and the keys they may see: a prompt's, then their own.

    mask: [queries, keys] bool, or None for plainly causal.
    """

    start: int
    stop: int
    prompt: slice
    mask: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """The attention output [1, H, stop - start, D] of these queries, of a whole row's."""
        causal = self.mask is None
        seen = (self._keys(x) for x in (key, value))
        own = query[:, :, self.start : self.stop]
        return _attention(own, *seen, mask=self.mask, causal=causal, scale=scale)

    def _keys(self, x: Tensor) -> Tensor:
        own = x[:, :, self.start : self.stop]
        return own if self.prompt.start == self.start else torch.cat([x[:, :, self.prompt], own], dim=2)


@dataclass(frozen=True)
class Grid:
    """Siblings side by side, [n, longest]: none is multiplied with another, but each has a copy of the prompt's keys.

    at: [n · longest] where each stands in the row (padding anywhere); back: the inverse, for the siblings' own tokens.
    """

    siblings: int
    prompt: slice
    at: Tensor
    back: Tensor
    mask: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `Piece`."""
        n = self.siblings
        own = (x[0].index_select(1, self.at).unflatten(1, (n, -1)).transpose(0, 1) for x in (query, key, value))
        q, *keys = own
        k, v = (
            torch.cat([x[:, :, self.prompt].expand(n, -1, -1, -1), o], dim=2)
            for x, o in zip((key, value), keys, strict=True)
        )
        out = _attention(q, k, v, mask=self.mask, causal=False, scale=scale)
        return out.transpose(0, 1).flatten(1, 2).index_select(1, self.back)[None]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    narrow = query.dtype != torch.float32 and query.device.type == "cpu"
    if narrow and query.shape[0] * query.shape[2] * key.shape[2] <= PLAIN:
        return _plain_attention(query, key, value, mask, scale)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention written out: PyTorch's own is several times slower with 16-bit numbers on a CPU, above all backward."""
    n, H, L, D = query.shape
    K, S = key.shape[1:3]
    if mask is None:
        mask = torch.ones(L, S, dtype=torch.bool, device=query.device).tril()
    scores = (query.reshape(n, K, -1, D) * (D**-0.5 if scale is None else scale)) @ key.transpose(2, 3)
    scores = scores.view(n, H, L, S).float().masked_fill(~mask, -torch.inf)
    share = torch.softmax(scores, dim=-1).to(query.dtype)
    return (share.view(n, K, -1, S) @ value).view(n, H, L, D)


@dataclass(frozen=True, eq=False)
class Packed:
    """Groups in one row without padding.

    ids, positions: [1, S]; positions start again after each prompt. at: [M] where each response token is predicted.
    target: [M] those tokens, all responses one after another. pieces: the attention, in the row's order.
    """

    ids: Tensor
    positions: Tensor
    at: Tensor
    target: Tensor
    pieces: tuple[Piece | Grid, ...]

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> Packed:
        """The rows packed one after another."""
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        at: list[np.ndarray] = []
        pieces: list[Piece | Grid] = []
        begin = 0
        for row in rows:
            P, end = len(row.prompt), begin + len(row.prompt)
            ids.append(row.prompt)
            positions.append(np.arange(P))
            for response in row.responses:
                inputs = len(response) - 1
                ids.append(response[:-1])
                positions.append(np.arange(P, P + inputs))
                at.append(np.concatenate([[begin + P - 1], np.arange(end, end + inputs)]))
                end += inputs
            pieces += _pieces(begin, P, [len(r) - 1 for r in row.responses], device)
            begin = end
        target = np.concatenate([r for row in rows for r in row.responses])
        flat = [np.concatenate(x).astype(np.int64) for x in (ids, positions, at)] + [target.astype(np.int64)]
        whole = [torch.from_numpy(x).to(device) for x in flat]
        return Packed(whole[0][None], whole[1][None], whole[2], whole[3], tuple(pieces))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `Plan`."""
        out = [p.attend(query, key, value, scale) for p in self.pieces]
        return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _pieces(begin: int, P: int, lengths: Sequence[int], device: torch.device) -> list[Piece | Grid]:
    """The attention of one group: its prompt, then its siblings, as many at a time as make a piece."""
    prompt = slice(begin, begin + P)
    pieces: list[Piece | Grid] = [Piece(prompt.start, prompt.stop, prompt, None)]
    start, held = prompt.stop, [0]
    for length in [*lengths, PIECE]:  # a last one that never fits, to close the piece at hand
        if sum(held) and sum(held) + length > PIECE:
            pieces.append(_siblings(start, prompt, [x for x in held if x], device))
            start, held = start + sum(held), []
        held.append(length)
    return pieces


def _siblings(start: int, prompt: slice, lengths: Sequence[int], device: torch.device) -> Piece | Grid:
    """Siblings of some lengths, each of which sees the prompt and, up to where it is, itself.

    Side by side where that is less to multiply, unless the prompt is so long that copies of its keys fill the memory.
    """
    n, P, whole, longest = len(lengths), prompt.stop - prompt.start, sum(lengths), max(lengths)
    index, size = torch.arange(whole, device=device), torch.tensor(lengths, device=device)
    whose = torch.repeat_interleave(torch.arange(n, device=device), size)
    if n * longest * (P + longest) < whole * (P + whole) and n * (P + longest) <= COPIES * (P + whole):
        back = whose * longest + index - (torch.cumsum(size, 0) - size)[whose]
        at = torch.full((n * longest,), start, device=device).index_copy_(0, back, start + index)
        mask = torch.ones(longest, P + longest, dtype=torch.bool, device=device).tril(P)
        return Grid(n, prompt, at, back, mask)
    own = (whose[:, None] == whose[None]).tril()
    return Piece(start, start + whole, prompt, torch.cat([own.new_ones(whole, P), own], dim=1))


class Cache:
    """Keys and values while sampling: each prompt's once, each live response's own.

    `fill` reads the prompts; each `step` reads one token of every live response. Responses stay ordered by prompt.
    """

    def __init__(self, prompts: Sequence[np.ndarray], group: int, room: int, device: torch.device) -> None:
        """prompts [N] of token ids; group G siblings; room: the most tokens of a response."""
        self.time, self.room = 0, room
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)
        # A response of one token stands for the hidden state that predicts it.
        self._filling: Packed | None = Packed.of([Row(p, (p[:1],)) for p in prompts], device)
        self.owner = torch.arange(len(prompts), device=device).repeat_interleave(group)
        self._prompt: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self._layout()

    def fill(self, causal: Any) -> Tensor:
        """Read the prompts; the hidden state [N, d] that predicts each one's first token."""
        prompts = self._filling
        assert prompts is not None
        last = hidden(causal, prompts.ids, prompts.positions, self)[prompts.at]
        self._filling = None
        return last

    def step(self, causal: Any, ids: Tensor) -> Tensor:
        """Read token ids [1, B] of the live responses; the hidden states [B, d] that predict their next tokens."""
        out = hidden(causal, ids, (self.lengths[self.owner] + self.time)[None], self)
        self.time += 1
        return out

    def _layout(self) -> None:
        """Where each live response stands in a [N, Gmax] grid, and which prompt positions are real."""
        N, B = len(self.lengths), len(self.owner)
        count = torch.bincount(self.owner, minlength=N)
        self._width = int(count.max()) if B else 0
        rank = torch.arange(B, device=self.owner.device) - (torch.cumsum(count, 0) - count)[self.owner]
        self._slot = self.owner * self._width + rank
        self._full = N * self._width == B
        longest = int(self.lengths.max())
        absent = torch.arange(longest, device=self.lengths.device)[None] >= self.lengths[:, None]
        self._absent = absent[self.owner][:, None, None, :] if bool(absent.any()) else None

    def keep(self, live: Tensor) -> None:
        """Drop the responses [B] that are not live."""
        rows = torch.nonzero(live)[:, 0]
        owner = self.owner[rows]
        prompts, owner = torch.unique(owner, return_inverse=True)
        if len(prompts) < len(self.lengths):
            longest = int(self.lengths[prompts].max())
            pick = {i: (k[prompts][:, :, :longest], v[prompts][:, :, :longest]) for i, (k, v) in self._prompt.items()}
            self._prompt, self.lengths = pick, self.lengths[prompts]
        self._own = {i: (k[rows], v[rows]) for i, (k, v) in self._own.items()}
        self.owner = owner
        self._layout()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `Plan`."""
        if self._filling is not None:
            self._prompt[layer] = (self._grid(key), self._grid(value))
            return self._filling.attend(layer, query, key, value, scale)
        t = self.time
        own_key, own_value = self._room(layer, key)
        own_key[:, :, t], own_value[:, :, t] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        own_key, own_value = own_key[:, :, : t + 1], own_value[:, :, : t + 1]
        prompt_key, prompt_value = self._prompt[layer]
        B, K, D = len(self.owner), key.shape[1], key.shape[3]
        q = query[0].transpose(0, 1).reshape(B, K, -1, D) * (D**-0.5 if scale is None else scale)
        seen = self._by_row(self._by_prompt(q) @ prompt_key.transpose(2, 3), q.shape[2])
        if self._absent is not None:
            seen = seen.masked_fill(self._absent, -torch.inf)
        scores = torch.cat([seen, q @ own_key.transpose(2, 3)], dim=3)
        share = torch.softmax(scores, dim=3, dtype=torch.float32).to(q.dtype)
        P = prompt_key.shape[2]
        out = self._by_row(self._by_prompt(share[..., :P]) @ prompt_value, q.shape[2]) + share[..., P:] @ own_value
        return out.reshape(B, -1, D).transpose(0, 1)[None]

    def _grid(self, x: Tensor) -> Tensor:
        """Prompts' keys [N, K, Pmax, D] from packed ones [1, K, S, D]; 0 beyond a prompt."""
        parts = torch.split(x[0].transpose(0, 1), self.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2).contiguous()  # type: ignore[arg-type]

    def _room(self, layer: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Space for the responses' keys and values, [B, K, allocated, D], doubled as they grow."""
        if layer not in self._own or self._own[layer][0].shape[2] <= self.time:
            allocated = min(self.room, max(16, 2 * self.time))
            shape = (len(self.owner), key.shape[1], allocated, key.shape[3])
            new = (key.new_zeros(shape), key.new_zeros(shape))
            for old, fresh in zip(self._own.get(layer, ()), new, strict=False):
                fresh[:, :, : old.shape[2]] = old
            self._own[layer] = new
        return self._own[layer]

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[N, K, Gmax · R, E] from [B, K, R, E]: a prompt's rows side by side, so that its keys are read once."""
        N, (_, K, R, E) = len(self.lengths), x.shape
        if not self._full:
            x = x.new_zeros(N * self._width, K, R, E).index_copy_(0, self._slot, x)
        return x.reshape(N, self._width, K, R, E).transpose(1, 2).reshape(N, K, self._width * R, E)

    def _by_row(self, x: Tensor, R: int) -> Tensor:
        """The inverse of `_by_prompt`."""
        N, K, _, E = x.shape
        x = x.reshape(N, K, self._width, R, E).transpose(1, 2).reshape(N * self._width, K, R, E)
        return x if self._full else x[self._slot]


def as_ids(rows: Any, device: torch.device) -> Tensor:
    """Token ids as a tensor of int64."""
    return torch.as_tensor(np.asarray(rows, np.int64), device=device)


def hidden(causal: Any, ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
    """Last hidden states [S, d] of one packed row."""
    # A mask of four dimensions is passed on as it is: it keeps the model from building one; the plan takes its place.
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    out = causal.base_model(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, plan=plan, return_dict=True
    )
    return out.last_hidden_state[0]


def head(causal: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [V, d] and bias [V] of the layer that makes logits."""
    layer = causal.get_output_embeddings()
    return layer.weight, getattr(layer, "bias", None)


def packs(causal: Any) -> bool:
    """Whether this model computes packed rows, and samples from a `Cache`, as it computes single rows: it is tried.

    Where it does, the model's attention is `attention` from here on. Sliding windows and transformed logits are left
    to the model's own forward.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config = causal.config.get_text_config()
    context = getattr(config, "max_position_embeddings", 0)
    windows = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    scaled = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    if (windows and windows < context) or any(getattr(config, name, None) for name in scaled):
        return False
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before = config._attn_implementation
    try:
        causal.set_attn_implementation(NAME)
        same = _agrees(causal)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError):
        same = False
    if not same:
        causal.set_attn_implementation(before)
    return same


@torch.no_grad()
def _agrees(causal: Any) -> bool:
    """Logits of two small groups, packed and sampled from a cache, against those of single rows."""
    device, V = causal.device, causal.config.get_text_config().vocab_size
    draw = np.random.default_rng(0)
    rows = [Row(draw.integers(V, size=P), tuple(draw.integers(V, size=(3, 3)))) for P in (5, 3)]
    single = [(row.prompt, r) for row in rows for r in row.responses]
    plain = [causal(input_ids=as_ids([np.concatenate(x)], device), use_cache=False).logits[0] for x in single]
    # [6 responses, 4 positions, V]: from the prompt's last token to the response's last.
    wanted = torch.stack([x[len(prompt) - 1 :] for x, (prompt, _) in zip(plain, single, strict=True)])
    weight, bias = head(causal)
    packed = Packed.of(rows, device)
    found = [linear(hidden(causal, packed.ids, packed.positions, packed)[packed.at], weight, bias).unflatten(0, (6, 3))]
    cache = Cache([row.prompt for row in rows], 3, 3, device)
    cache.fill(causal)
    for t in range(3):
        ids = as_ids([[r[t] for _, r in single]], device)
        found.append(linear(cache.step(causal, ids), weight, bias)[:, None])
    differ = torch.cat(found, dim=1) - torch.cat([wanted[:, :3], wanted[:, 1:]], dim=1)
    near = 1e-3 if weight.dtype == torch.float32 else 0.1
    return float(differ.abs().max()) <= near * float(wanted.abs().max())
