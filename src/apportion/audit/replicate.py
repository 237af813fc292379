"""Groups drawn at random, for what no enumeration reaches: mean updates and squared norms, with their spread."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from apportion.audit.tables import Tables
from apportion.core.method import Method
from apportion.core.parts import PairLogistic
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights
from apportion.toy import policy
from apportion.toy.collect import preferences

BLOCKS = 20
"""Batches of replicates that intervals are taken over."""


@dataclass(frozen=True, eq=False)
class Replicates:
    """R groups of every prompt: `rows` [N, R, G], `w` [N, R, G, L] (in the units of `Weighed.w`, over G), `silent`."""

    rows: np.ndarray
    w: np.ndarray
    silent: np.ndarray
    """bool [N, R]"""


def labelled(
    tables: Tables, book: Rollouts, prompts: np.ndarray, rows: np.ndarray, rng: np.random.Generator
) -> Rollouts:
    """The book of pairs with their labels, drawn, in place of the task's reward."""
    paid = np.zeros_like(book.reward)
    labels = preferences(tables.language, rows, prompts, rng)
    np.put_along_axis(paid, tables.language.length[rows][..., None] - 1, labels[..., None], axis=-1)
    return dataclasses.replace(book, reward=paid)


def replicate(method: Method, tables: Tables, count: int, seed: int = 0) -> Replicates:
    """`count` groups of every prompt. The same seed draws the same uniforms at every policy and for every method.

    All groups are weighed as one collection, so that what the batch fixes is close to its value over the population.
    """
    N, G = len(tables.mass), method.sampler.group
    rng = np.random.default_rng(seed)
    prompts = np.repeat(np.arange(N), count)
    rows = policy.sample(tables.language, tables.sampled, rng, G, prompts)
    book = tables.book(prompts, rows, np.full(len(rows), 1.0 / len(rows)))
    if method.sampler.feedback == "preference":
        book = labelled(tables, book, prompts, rows, rng)
    ledger = weights(method, advantages(method, book), tables.logp[prompts[:, None], rows])
    w = np.asarray(ledger.w) * len(rows)
    loud = (np.abs(np.asarray(ledger.advantage)) * book.mask).max(axis=-1) > 0
    silent = ~(loud & (np.asarray(method.sampler.keep(book)) > 0)).any(axis=1)
    if isinstance(method.trust, PairLogistic):
        silent = ~(np.abs(w) > 0).any(axis=(1, 2))
    shape = (N, count)
    return Replicates(rows.reshape(*shape, G), w.reshape(*shape, G, -1), silent.reshape(shape))


def updates(tables: Tables, drawn: Replicates) -> np.ndarray:
    """Mean update of each prompt in each block of replicates, [BLOCKS, N, K, V], before the mean over prompts."""
    N, R = drawn.rows.shape[:2]
    who = np.arange(N)[:, None, None]
    blocks = np.array_split(np.arange(R), BLOCKS)
    return np.stack(
        [
            policy.score_sum(tables.language, tables.logits, drawn.w[:, b] / len(b), drawn.rows[:, b], who)
            for b in blocks
        ]
    )


def squared_norms(tables: Tables, drawn: Replicates) -> np.ndarray:
    """Squared norm of each group's update, [N, R], before the mean over prompts.

    Scores meet only at a shared prefix, which two responses can share only at the same decision; there
    <score(a), score(b)> = [a = b] - p(a) - p(b) + sum p².
    """
    language, N = tables.language, len(tables.mass)
    p = np.exp(policy.log_softmax(tables.logits))
    who, rows = np.arange(N)[:, None, None, None], drawn.rows
    prefix, token = language.prefix[rows], language.sequences[rows]
    taken = p[who, prefix, token]
    square = (p * p).sum(axis=-1)[who, prefix]
    w = drawn.w * language.mask[rows]
    total = np.zeros(rows.shape[:2])
    for i in range(rows.shape[2]):
        same = prefix == prefix[:, :, i : i + 1]
        dot = (token == token[:, :, i : i + 1]) - taken - taken[:, :, i : i + 1] + square
        total += (w * w[:, :, i : i + 1] * np.where(same, dot, 0.0)).sum(axis=(2, 3))
    return total
