"""The weights of a batch of responses, and what is logged of them: where PyTorch's log-probabilities meet the core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from apportion.core.method import Method
from apportion.core.weigh import Ledger, weights
from apportion.lm.generate import Completions
from apportion.lm.passes import Batch

Ragged = Sequence[Sequence[np.ndarray]]


@dataclass(frozen=True)
class Signals:
    """Of one collection's updates, for the log. Means are over the response tokens that went through the model.

    entropy: of the sampled distribution (nats). clip_fraction: tokens whose gate is not 1. kl: of the policy to the
    sampler (k3). grad_norm: mean over updates, before clipping. learning_rate: of the last update. beta: the KL
    coefficient that was used. live: share of the responses with a weight, the only ones that need a pass.
    updates: optimiser steps taken. mismatch: mean |log pi - log q| between trainer and sampler before any step.
    mismatch_ratio: the largest pi / q among those tokens. capped: share of the importance weights that the cap cut.
    """

    entropy: float = 0.0
    clip_fraction: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    beta: float = 0.0
    live: float = 0.0
    updates: int = 0
    mismatch: float = 0.0
    mismatch_ratio: float = 1.0
    capped: float = 0.0

    def row(self) -> dict[str, float]:
        """The signals by name."""
        return asdict(self)


@dataclass(frozen=True)
class Terms:
    """How trainer and sampler are compared: the fields `old`, `correction` and `cap` of `Learner`."""

    old: Literal["sampler", "trainer"] = "sampler"
    correction: Literal["token", "sequence"] | None = None
    cap: float = 2.0


def dense(ragged: Ragged, exists: np.ndarray) -> np.ndarray:
    """[N G T] of [N][G] arrays, in the order of the true entries of `exists`; 0 elsewhere."""
    out = np.zeros(exists.shape)
    out[exists] = np.concatenate([np.asarray(x, np.float64) for group in ragged for x in group])
    return out


class Account:
    """One collection while it is learned from: its ledger, and the sums of its signals.

    beta: the KL coefficient that holds for it.
    """

    def __init__(self, method: Method, completions: Completions, ledger: Ledger, beta: float, terms: Terms) -> None:
        self.method, self.completions, self.ledger, self.beta, self.terms = method, completions, ledger, beta, terms
        self.spread = ledger.mask / max(ledger.mask.sum(), 1)
        self.old: np.ndarray | None = None
        self.sums = dict.fromkeys(("tokens", "entropy", "shut", "kl", "fresh", "mismatch", "capped"), 0.0)
        self.largest = 0.0

    def take_old(self, old: np.ndarray, exists: np.ndarray) -> None:
        """The trainer's own log-probabilities [N G T], from a pass before the first step."""
        self.old = old
        self._compare((old - self.ledger.logq)[exists])

    def weigh(self, batch: Batch, logp: Tensor, entropy: Tensor, fresh: bool) -> tuple[Tensor, Tensor]:
        """w [M] and the entropy's share [M] of a batch's response tokens, given their logp and entropy [M].

        fresh: no step has been taken since the collection was drawn.
        """
        n, g = (np.array(x) for x in zip(*batch.index, strict=True))
        lengths = self.completions.lengths[n, g]
        T = int(lengths.max())
        exists = np.arange(T) < lengths[:, None]

        def cut(x: np.ndarray) -> np.ndarray:
            return x[n, g, None, :T]

        ledger = self.ledger.map(cut)
        now = np.zeros((len(n), 1, T))
        now[:, 0][exists] = logp.cpu().numpy()
        sampled = ledger.logq
        if self.terms.old == "trainer":
            old = now if self.old is None else cut(self.old)
            ledger = self._corrected(replace(ledger, logq=old), sampled)
        ledger = weights(self.method, ledger, now, self.beta)
        assert ledger.w is not None
        assert ledger.gate is not None
        drift = (now - ledger.logq)[:, 0][exists]
        if fresh and self.old is None:
            self._compare((now - sampled)[:, 0][exists])
        self._add(tokens=exists.sum(), entropy=float(entropy.sum()), shut=(ledger.gate[:, 0][exists] != 1).sum())
        self._add(kl=(np.expm1(drift) - drift).sum())
        return _like(ledger.w[:, 0][exists], logp), _like(cut(self.spread)[:, 0][exists], logp)

    def _corrected(self, ledger: Ledger, sampled: np.ndarray) -> Ledger:
        """The ledger with its advantage times min(pi_old / q, cap), where that was asked for."""
        if self.terms.correction is None:
            return ledger
        log_ratio = np.where(ledger.mask, ledger.logq - sampled, 0.0)
        if self.terms.correction == "sequence":
            log_ratio = log_ratio.sum(-1, keepdims=True) + 0 * log_ratio
        capped = log_ratio > math.log(self.terms.cap)
        self._add(capped=(capped & ledger.mask).sum())
        factor = np.where(capped, self.terms.cap, np.exp(np.minimum(log_ratio, math.log(self.terms.cap))))
        return replace(ledger, credit=ledger.credit * factor, baseline=ledger.baseline * factor)

    def _compare(self, difference: np.ndarray) -> None:
        self._add(fresh=difference.size, mismatch=np.abs(difference).sum())
        self.largest = max(self.largest, float(np.exp(difference.max(initial=-np.inf))))

    def _add(self, **sums: float) -> None:
        for name, x in sums.items():
            self.sums[name] += float(x)

    def signals(self, live: int, norms: Sequence[float], rate: float) -> Signals:
        """What is logged of the collection."""
        mean = {name: x / max(self.sums["tokens"], 1) for name, x in self.sums.items()}
        return Signals(
            entropy=mean["entropy"],
            clip_fraction=mean["shut"],
            kl=mean["kl"],
            grad_norm=sum(norms) / max(len(norms), 1),
            learning_rate=rate,
            beta=self.beta,
            live=live / self.completions.terminated.size,
            updates=len(norms),
            mismatch=self.sums["mismatch"] / max(self.sums["fresh"], 1),
            mismatch_ratio=self.largest if self.sums["fresh"] else 1.0,
            capped=mean["capped"],
        )


def _like(x: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(x).to(like)
