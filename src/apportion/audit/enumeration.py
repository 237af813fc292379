"""Exact expected weights, by enumerating what the siblings of a response can be.

A response's weight depends on its own story and on what its group's parts see of the other G - 1. What they see
takes few values, so a group is enumerated as one response followed by stand-ins for its siblings:

- `own`: no part looks at siblings; a group is one response.
- `classes`: parts see returns (and lengths, where they ask who is still alive). Stand-ins are the multisets of the
  classes of equal return: with 0/1 rewards, the success count.
- `affine`: the weight is an affine function of the others' returns. Two stand-ins, all others at the mean plus or
  minus the standard error, have the true mean and variance of that sum, so first and second moments are exact.

Every group carries its probability, and all prompts go in one book, so that denominators, means and spreads over the
batch take their population values: the large-batch limit, computed by the parts themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from math import comb, factorial
from typing import Literal

import numpy as np

from apportion.audit.tables import Tables, penalty, returns, without_loss_kl
from apportion.core.method import Method
from apportion.core.parts import (
    KL,
    GroupMean,
    KeepAll,
    KeepMixed,
    LeaveOneOut,
    PairLogistic,
    Process,
    SiblingMean,
)
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights
from apportion.toy.language import Language

Kind = Literal["own", "counts", "affine", "multisets", "pairs", "replicated"]
LIMIT = 3_000_000
"""Largest book, in decisions, that is enumeration."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of a book: which response leads each, and which classes its siblings are of. R groups.

    Classes are numbered over all prompts. `label` [N, S] and `other` [N, S] are the class of a response as the
    leader and as a sibling; `lead` and `stand` are one response of each; `home` is the prompt of each leader class.
    """

    label: np.ndarray
    other: np.ndarray
    lead: np.ndarray
    stand: np.ndarray
    home: np.ndarray
    prompts: np.ndarray
    own: np.ndarray
    members: np.ndarray
    """int [R, G-1]"""
    arrangements: np.ndarray
    """[R]: orders in which the siblings can come."""


def compares(method: Method) -> bool:
    """Whether any part looks at siblings."""
    parts = (method.baseline, method.scale, method.credit, method.sampler.keep)
    return any(p.scope == "group" or isinstance(p, KeepMixed) for p in parts)


def shaped(method: Method) -> bool:
    """Whether a penalty is in the reward, so that returns are not the task's."""
    return isinstance(method.kl, KL) and method.kl.place == "reward" and method.kl.beta > 0


def kind(method: Method, tables: Tables) -> Kind:
    """How the expected update of this method can be had."""
    if isinstance(method.trust, PairLogistic):
        return "pairs"
    if not compares(method):
        return "own"
    affine = all(p.affine for p in (method.scale, method.credit, method.sampler.keep) if p.scope == "group")
    affine = affine and not isinstance(method.sampler.keep, KeepMixed)
    if shaped(method) and affine and isinstance(method.baseline, (GroupMean, LeaveOneOut)):
        return "affine"
    size = _size(method, tables)
    if size > LIMIT:
        return "replicated"
    return "multisets" if shaped(method) or _by_length(method, tables.language) else "counts"


def _by_length(method: Method, language: Language) -> bool:
    """Whether it matters how long the siblings are."""
    return isinstance(method.baseline, SiblingMean) and len(np.unique(language.length)) > 1


def _alive(method: Method) -> bool:
    """Whether siblings must be real responses: some part reads more of them than their return."""
    filtered = not isinstance(method.sampler.keep, KeepAll) and shaped(method)
    return isinstance(method.baseline, SiblingMean) or isinstance(method.credit, Process) or filtered


def _apart(method: Method) -> bool:
    """Whether each response's own story is needed, not just its return and length."""
    return shaped(method) or method.sampler.values != "none"


def _numbered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes of equal keys `[N, S, ...]` within each prompt: label [N, S], one response of each, its prompt."""
    labels, leads, homes = [], [], []
    start = 0
    for n, key in enumerate(keys):
        _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
        labels.append(inverse.ravel() + start)
        leads.append(first)
        homes.append(np.full(len(first), n))
        start += len(first)
    return np.stack(labels), np.concatenate(leads), np.concatenate(homes)


def _keys(method: Method, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """What tells responses apart as leaders and as siblings, [N, S, columns]."""
    language = tables.language
    N, S = language.reward.shape
    length = np.broadcast_to(language.length.astype(float), (N, S))
    total = language.reward
    if shaped(method):
        total = np.round(returns(method, tables), 12)
    story = np.broadcast_to(np.arange(S, dtype=float), (N, S)) if _apart(method) else length
    seen = [total, language.reward] + ([length] if _by_length(method, language) else [])
    return np.stack([language.reward, story], axis=-1), np.stack(seen, axis=-1)


def _size(method: Method, tables: Tables) -> int:
    """Decisions in the book of all multisets."""
    own, seen = (_numbered(k) for k in _keys(method, tables))
    G = method.sampler.group
    groups = sum(
        int((own[2] == n).sum()) * comb(int((seen[2] == n).sum()) + G - 2, G - 1) for n in range(len(tables.mass))
    )
    return groups * G * tables.language.L


def layout(method: Method, tables: Tables) -> Layout:
    """The groups of the book of multisets; kept, where it does not depend on the policy."""
    if shaped(method):
        return _layout(method, tables)
    return _fixed_layout(method, tables.language)


@cache
def _fixed_layout(method: Method, language: Language) -> Layout:
    zeros = np.zeros(language.reward.shape)
    return _layout(method, Tables(language, zeros, zeros, zeros, zeros, zeros, zeros, zeros))


def _layout(method: Method, tables: Tables) -> Layout:
    own_key, seen_key = _keys(method, tables)
    label, lead, home = _numbered(own_key)
    other, stand, place = _numbered(seen_key)
    G = method.sampler.group
    prompts, own, members, arrangements = [], [], [], []
    for n in range(len(label)):
        leaders, classes = np.flatnonzero(home == n), np.flatnonzero(place == n)
        sets = np.array(list(combinations_with_replacement(classes, G - 1)), dtype=np.int64).reshape(-1, G - 1)
        orders = np.full(len(sets), float(factorial(G - 1)))
        for c in classes:
            orders /= np.array([factorial(k) for k in range(G)], float)[(sets == c).sum(axis=1)]
        own.append(np.repeat(leaders, len(sets)))
        members.append(np.tile(sets, (len(leaders), 1)))
        arrangements.append(np.tile(orders, len(leaders)))
        prompts.append(np.full(len(own[-1]), n))
    groups = (np.concatenate(x) for x in (prompts, own, members, arrangements))
    return Layout(label, other, lead, stand, home, *groups)


@dataclass(frozen=True, eq=False)
class Weighed:
    """A book after `weights`, for the leaders of its R groups, L decisions."""

    layout: Layout
    chance: np.ndarray
    """[R]: probability of the siblings given the leader."""
    mass: np.ndarray
    """[R]: probability of the group given the prompt."""
    w: np.ndarray
    """[R, L]: the leader's w, its group's probability divided out, times G: as if it were all the siblings."""
    share: np.ndarray
    """[R, L]: its share, in the same units."""
    silent: np.ndarray
    """bool [R]: every sibling's advantage is 0."""


def weigh(method: Method, tables: Tables) -> Weighed:
    """Enumerate the multisets and weigh their leaders with the real `advantages` and `weights` (no KL in the loss)."""
    plan = layout(method, tables)
    method = without_loss_kl(method)
    own = np.bincount(plan.label.ravel(), weights=tables.mass.ravel(), minlength=len(plan.lead))
    seen = np.bincount(plan.other.ravel(), weights=tables.mass.ravel(), minlength=len(plan.stand))
    chance = plan.arrangements * seen[plan.members].prod(axis=1)
    mass = own[plan.own] * chance
    rows = np.concatenate([plan.lead[plan.own][:, None], plan.stand[plan.members]], axis=1)
    if _alive(method):
        book = tables.book(plan.prompts, rows, mass / len(tables.mass))
    else:
        total = returns(method, tables) if shaped(method) else tables.language.reward
        totals = total[plan.prompts[:, None], rows[:, 1:]]
        book = tables.led(plan.prompts, rows[:, 0], totals, mass / len(tables.mass))
    return Weighed(plan, chance, mass, *_leaders(method, book, tables.logp[plan.prompts[:, None], rows]))


def _leaders(method: Method, book: Rollouts, logp: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """w and share of the leaders [R, L], and which groups are silent [R]; see `Weighed`."""
    ledger = weights(method, advantages(method, book), logp)
    w, share = np.asarray(ledger.w)[:, 0], np.asarray(ledger.share)[:, 0]
    # The leader speaks for G siblings. Shares that add up to one over the batch do so over the leaders.
    times = 1.0 / max(share.sum(), 1e-300) if method.aggregate.scope == "batch" else float(book.reward.shape[1])
    advantage = np.abs(np.asarray(ledger.advantage))
    loud = np.where(book.mask, advantage, 0.0)
    loud[:, 1:, 0] = advantage[:, 1:, 0]
    kept = np.asarray(method.sampler.keep(book)) > 0
    silent = ~((loud.max(axis=-1) > 0) & kept).any(axis=1)
    mass = book.probability
    per = np.where(mass > 0, times / np.where(mass > 0, mass, 1.0), 0.0)[:, None]
    return w * per, share * per, silent


def average(weighed: Weighed, method: Method, tables: Tables, chance: np.ndarray | None = None) -> np.ndarray:
    """Weight [N, S, L] of each response, averaged over its siblings; `chance [R]` in place of their probabilities
    picks out a part of the groups. A penalty in the loss is added here, response by response."""
    plan, size = weighed.layout, len(weighed.layout.lead)
    chance = weighed.chance if chance is None else chance
    w = np.zeros((size, weighed.w.shape[1]))
    np.add.at(w, plan.own, weighed.w * chance[:, None])
    extra = penalty(method, tables)
    if extra is None:
        return w[plan.label]
    share = np.zeros_like(w)
    np.add.at(share, plan.own, weighed.share * chance[:, None])
    return w[plan.label] + share[plan.label] * extra


def weigh_singles(method: Method, tables: Tables) -> np.ndarray:
    """Weight [N, S, L] of each response where no part looks at siblings."""
    book = tables.singles()
    ledger = advantages(method, book)
    logp = tables.logp.reshape(book.logq.shape)
    w = np.asarray(weights(method, ledger, logp).w).reshape(tables.reward.shape)
    mass = tables.mass[..., None] / len(tables.mass)
    return np.divide(w, mass, out=np.zeros_like(w), where=mass > 0)


def weigh_affine(
    method: Method, tables: Tables, sides: tuple[float, ...] = (-1.0, 1.0)
) -> tuple[list[np.ndarray], np.ndarray]:
    """Weights [N, S, L] of each response with the others at each of `sides`, and the deviation of a return [N].

    At a side of ±1 the others' sum is off its mean by sqrt(G - 1) standard deviations of one return.
    """
    G, (N, S) = method.sampler.group, tables.mass.shape
    total = returns(method, tables)
    mean = (tables.mass * total).sum(axis=1)
    deviation = np.sqrt((tables.mass * (total - mean[:, None]) ** 2).sum(axis=1))
    M = len(sides)
    every, who = np.tile(np.arange(S), M * N), np.repeat(np.arange(N), M * S)
    side = np.tile(np.repeat(np.array(sides), S), N)
    stand_in = mean[who] + side * deviation[who] / np.sqrt(G - 1)
    mass = tables.mass[who, every] / (M * N)
    book = tables.led(who, every, np.repeat(stand_in[:, None], G - 1, axis=1), mass)
    w, _, _ = _leaders(method, book, book.logq)
    return list(np.moveaxis(w.reshape(N, M, S, -1), 1, 0)), deviation
