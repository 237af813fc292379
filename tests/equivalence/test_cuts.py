"""What must not change the gradient: micro-batches, padding, the order of siblings and groups, the number of devices.

Denominators are fixed on the whole collection; whatever is cut after that only splits a sum.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core import catalogue as c
from apportion.core.method import Method
from apportion.core.parts import Clip, DecisionMean, PairLogistic, SequenceRatio
from apportion.core.weigh import Ledger, advantages, weights
from core.books import DECISION, for_method, rollouts

TRL_RLOO = c.rloo.replace(ratio=SequenceRatio(geometric=False), trust=Clip(), aggregate=c.grpo.aggregate)
METHODS = [*c.METHODS.values(), TRL_RLOO]
WHOLE_ROWS = [m for m in METHODS if not isinstance(m.trust, PairLogistic)]
PER_DECISION = [m for m in WHOLE_ROWS if not m.ratio.per_sequence]
seeds = st.integers(0, 9999)


def few(**strategies: Any) -> Any:
    """25 examples each: there are many tests, and the family is large."""
    return lambda test: settings(max_examples=25)(given(**strategies)(test))


family = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def whole(method: Method, book: dict[str, Any]) -> Ledger:
    return weights(method, advantages(method, rollouts(book)), book["logp"])


def parameters(shape: tuple[int, ...], seed: int) -> Any:
    """grad log pi of each decision by 5 parameters, [N G T P]."""
    return np.random.default_rng(seed).normal(size=(*shape, 5))


def gradient(w: Any, score: Any) -> Any:
    return (w[..., None] * score).reshape(-1, score.shape[-1]).sum(0)


def same(actual: Any, desired: Any) -> None:
    np.testing.assert_allclose(actual, desired, rtol=1e-10, atol=1e-11 * max(1.0, np.abs(desired).max(initial=0)))


def cut_and_sum(method: Method, book: dict[str, Any], pieces: list[Any], seed: int) -> None:
    """The pieces' w are the whole's w, and their gradients add up to the whole's."""
    ledger = advantages(method, rollouts(book))
    all_ = weights(method, ledger, book["logp"])
    score = parameters(book["mask"].shape, seed)
    total = 0
    for piece in pieces:
        part = weights(method, ledger.map(lambda x, at=piece: x[at]), book["logp"][piece])
        same(part.w, all_.w[piece])
        total = total + gradient(part.w, score[piece])
    same(total, gradient(all_.w, score))


@family
@few(seed=seeds, N=st.integers(1, 6), data=st.data())
def test_micro_batches_of_groups(method, seed, N, data):
    """Any assignment of groups to micro-batches or devices."""
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=N, max_size=N)))
    book = for_method(method, seed, N=N)
    cut_and_sum(method, book, [np.flatnonzero(owner == k) for k in np.unique(owner)], seed)


@pytest.mark.parametrize("method", WHOLE_ROWS, ids=lambda m: m.name)
@few(seed=seeds, data=st.data())
def test_micro_batches_of_trajectories(method, seed, data):
    """Siblings may part once their advantages are in the ledger: rows as [B T], in any order and cut."""
    book = for_method(method, seed)
    N, G, _ = book["mask"].shape
    order = np.array(data.draw(st.permutations(range(N * G))))
    size = data.draw(st.integers(1, N * G))
    pieces = [np.unravel_index(order[i : i + size], (N, G)) for i in range(0, N * G, size)]
    cut_and_sum(method, book, pieces, seed)


@pytest.mark.parametrize("method", PER_DECISION, ids=lambda m: m.name)
@few(seed=seeds, data=st.data())
def test_micro_batches_of_decisions(method, seed, data):
    """Methods without a part that spans a trajectory take single decisions, as control's minibatches do."""
    book = for_method(method, seed)
    at = np.flatnonzero(book["mask"])
    order = at[np.array(data.draw(st.permutations(range(len(at)))), int)]
    size = data.draw(st.integers(1, max(1, len(at))))
    pieces = [np.unravel_index(order[i : i + size], book["mask"].shape) for i in range(0, len(at), size)]
    cut_and_sum(method, book, pieces, seed)


def padded(book: dict[str, Any], left: int, right: int) -> dict[str, Any]:
    """The book with masked positions around it, junk in their numbers and no reward."""
    fill = dict.fromkeys(("mask", "terminated", "truncated", "step"), False) | {"reward": 0.0}

    def pad(name: str, x: Any) -> Any:
        ends = ((0, 0), (0, 0), (left, right))
        return np.pad(x, ends, constant_values=fill.get(name, -np.inf))

    return {k: pad(k, v) if v is not None and k in (*DECISION, "logp") else v for k, v in book.items()}


@family
@few(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 5))
def test_padding(method, seed, left, right):
    book = for_method(method, seed)
    plain, wide = whole(method, book), whole(method, padded(book, left, right))
    T = book["mask"].shape[-1]
    same(wide.w[..., left : left + T], plain.w)
    outside = np.concatenate([wide.w[..., :left], wide.w[..., left + T :]], -1)
    assert (outside == 0).all()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@few(seed=seeds)
def test_padding_with_the_ends_left_to_the_mask(method, seed):
    """Without `terminated` the last decision of each row is the end, however wide the row."""
    book = for_method(method, seed) | {"terminated": None, "truncated": None}
    T = book["mask"].shape[-1]
    same(whole(method, padded(book, 0, 4)).w[..., :T], whole(method, book).w)


def reordered(book: dict[str, Any], order: Any, axis: int) -> dict[str, Any]:
    def move(x: Any) -> Any:
        return np.take(x, order, axis) if isinstance(x, np.ndarray) and x.ndim > axis else x

    return {k: move(v) for k, v in book.items()}


@family
@few(seed=seeds, data=st.data(), fail=st.booleans())
def test_sibling_order(method, seed, data, fail):
    book = for_method(method, seed)
    N, G, _ = book["mask"].shape
    if fail and method is not c.dpo:
        book["scored"] = np.random.default_rng(seed).random((N, G)) < 0.8
    order = np.array(data.draw(st.permutations(range(G))))
    same(whole(method, reordered(book, order, 1)).w, whole(method, book).w[:, order])


@family
@few(seed=seeds, data=st.data())
def test_group_order(method, seed, data):
    book = for_method(method, seed, N=4)
    book["mass"] = np.random.default_rng(seed).dirichlet(np.ones(4))
    order = np.array(data.draw(st.permutations(range(4))))
    same(whole(method, reordered(book, order, 0)).w, whole(method, book).w[order])


@family
@few(seed=seeds, times=st.integers(2, 3))
def test_mass_is_a_count(method, seed, times):
    """A group that was sampled `times` times weighs as one group of that mass."""
    if getattr(method.scale, "ddof", 0) and method.scale.scope == "batch":
        method = method.set("scale.ddof", 0)  # Bessel's correction counts draws, which a mass does not say
    book = for_method(method, seed, N=2)
    often = np.array([0] * times + [1])
    repeated = whole(method, reordered(book, often, 0)).w
    weighed = whole(method, book | {"mass": np.array([times, 1]) / (times + 1)}).w
    same(weighed, np.stack([repeated[:times].sum(0), repeated[times]]))


@family
@few(seed=seeds)
def test_shares_are_of_the_whole_collection(method, seed):
    """Their sum says what the aggregation promises, before anything is cut."""
    book = for_method(method, seed)
    ledger = advantages(method, rollouts(book))
    kept = method.sampler.keep(rollouts(book))
    length = book["mask"].sum(-1)
    right = {
        "Sum": (kept * length).sum() / max(kept.sum(), 1e-300),
        "SequenceMean": float(kept.any()),
        "DecisionMean": float(kept.any()),
        "Constant": (kept * length).sum() / max(kept.sum(), 1e-300) / book["horizon"],
    }
    same(ledger.share.sum(), right[type(method.aggregate).__name__])
    assert (ledger.share[~book["mask"]] == 0).all()


def test_the_usual_mistake_is_seen_by_these_tests():
    """Advantages and denominators taken in each micro-batch, then averaged: another gradient."""
    book = for_method(c.dapo, 1, N=4)
    score = parameters(book["mask"].shape, 1)
    right = gradient(whole(c.dapo, book).w, score)
    halves = [{k: v[i : i + 2] if isinstance(v, np.ndarray) else v for k, v in book.items()} for i in (0, 2)]
    wrong = sum(gradient(whole(c.dapo, half).w, score[i : i + 2]) for half, i in zip(halves, (0, 2), strict=True)) / 2
    assert isinstance(c.dapo.aggregate, DecisionMean)
    assert np.abs(wrong - right).max() > 1e-3


def test_a_cut_takes_every_row_of_the_ledger():
    ledger = whole(c.grpo, for_method(c.grpo, 0))
    half = ledger.map(lambda x: x[:1])
    assert {f.name: getattr(half, f.name).shape for f in fields(Ledger)} == dict.fromkeys(
        [f.name for f in fields(Ledger)], (1, 4, 6)
    )
