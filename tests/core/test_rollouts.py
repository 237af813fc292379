"""The book: shapes, refusals of what is not finite, ends, and that nothing reads what does not count."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core import catalogue as c
from apportion.core.arrays import reverse_cumulative, reverse_cumulative_max
from apportion.core.errors import InvalidData
from apportion.core.parts import Constant
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, needs, weights
from core.books import DECISION, draw, for_method, rollouts, rows

NUMBERS = ("logq", "logref", "value", "next_value")
BAD = [math.nan, math.inf, -math.inf]


@given(
    seed=st.integers(0, 999),
    field=st.sampled_from(["reward", *NUMBERS]),
    bad=st.sampled_from(BAD),
    data=st.data(),
)
def test_a_number_that_is_not_finite_is_refused_by_its_index(seed, field, bad, data):
    book = draw(seed)
    n, g, t = data.draw(st.sampled_from([tuple(map(int, at)) for at in np.argwhere(book["mask"])]))
    book[field][n, g, t] = bad
    with pytest.raises(InvalidData) as refused:
        rollouts(book).check()
    assert str(refused.value).startswith(f"{field} is {bad} at [n={n}, g={g}, t={t}]; it must be finite there; ")


@pytest.mark.parametrize("bad", BAD)
def test_weighing_refuses_it_too(bad):
    """Nobody has to remember `check`."""
    book, method = draw(0), c.dr_grpo
    ledger = advantages(method, rollouts(book))
    n, g, t = np.argwhere(book["mask"])[3]
    book["logp"][n, g, t] = bad
    with pytest.raises(InvalidData, match=rf"logp is {bad} at \[n={n}, g={g}, t={t}\]"):
        weights(method, ledger, book["logp"])
    book["reward"][n, g, t] = bad
    with pytest.raises(InvalidData, match=rf"reward is {bad} at \[n={n}, g={g}, t={t}\]"):
        advantages(method, rollouts(book))


@given(seed=st.integers(0, 999), bad=st.sampled_from(BAD))
def test_the_first_of_several_is_named_and_the_greedy_return_too(seed, bad):
    book = draw(seed)
    book["reward"][1:] = bad
    with pytest.raises(InvalidData, match=r"reward is \S+ at \[n=1, g=0, t=0\]; .* unscored"):
        rollouts(book).check()
    book = draw(seed)
    book["greedy_return"][2] = bad
    with pytest.raises(InvalidData, match=r"greedy_return is \S+ at \[n=2\]"):
        rollouts(book).check()


@given(seed=st.integers(0, 999))
def test_a_good_book_is_returned_as_it_is(seed):
    book = rollouts(draw(seed))
    assert book.check() is book


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
@given(seed=st.integers(0, 999), junk=st.sampled_from([*BAD, 1e30]))
def test_nothing_reads_what_is_masked(method, seed, junk):
    """-inf at a padded position is what a masked softmax leaves there; 0 times it would be NaN."""
    book = for_method(method, seed)
    clean = weights(method, advantages(method, rollouts(book)), book["logp"])
    for field in (*NUMBERS, "logp"):
        book[field] = np.where(book["mask"], book[field], junk)
    dirty = weights(method, advantages(method, rollouts(book).check()), book["logp"])
    for name in ("w", "advantage", "share", "gate"):
        np.testing.assert_array_equal(getattr(dirty, name)[book["mask"]], getattr(clean, name)[book["mask"]])
    np.testing.assert_array_equal(dirty.w, clean.w)


@pytest.mark.parametrize("method", c.METHODS.values(), ids=lambda m: m.name)
def test_a_field_that_the_method_reads_and_the_book_lacks(method):
    book = rollouts(for_method(method, 0))
    for field in needs(method):
        with pytest.raises(InvalidData, match=rf"{method.name} reads {field}, .* give Rollouts\({field}=\.\.\.\)"):
            advantages(method, replace(book, **{field: None}))
    others = {"logref", "value", "next_value", "greedy_return"} - needs(method)
    advantages(method, replace(book, **dict.fromkeys(others)))


def test_a_method_without_reward_does_not_read_it():
    book = draw(3)
    paid = advantages(c.distill, rollouts(book))
    unpaid = advantages(c.distill, replace(rollouts(book), reward=np.zeros_like(book["reward"])))
    np.testing.assert_array_equal(paid.advantage, unpaid.advantage)


@given(field=st.sampled_from(DECISION[1:]), axis=st.integers(0, 2))
def test_a_wrong_shape_is_named(field, axis):
    book = draw(0, steps=True)
    wrong = np.concatenate([book[field]] * 2, axis=axis)
    with pytest.raises(InvalidData, match=rf"{field} has shape \({', '.join(map(str, wrong.shape))}\); .*\(3, 4, 6\)"):
        rollouts(book | {field: wrong})


@pytest.mark.parametrize(("field", "shape"), [("scored", (3,)), ("greedy_return", (3, 4)), ("mass", (4,))])
def test_a_wrong_shape_of_the_smaller_fields(field, shape):
    with pytest.raises(InvalidData, match=f"{field} has shape"):
        rollouts(draw(0) | {field: np.ones(shape)})


def test_a_reward_without_its_axes():
    with pytest.raises(InvalidData, match=r"reward has shape \(4,\); it must be \[N groups, G siblings, T decisions\]"):
        Rollouts(np.ones(4), np.ones(4, bool), np.ones(4))


def test_a_reward_outside_the_declared_steps():
    book = rows([0.5, 1.0], step=np.array([[[False, True]]]))
    with pytest.raises(InvalidData, match="mark it as a step"):
        book.check()


def test_a_constant_without_a_length():
    with pytest.raises(InvalidData, match=r"give Constant\(length=\.\.\.\) or Rollouts\(horizon=\.\.\.\)"):
        advantages(c.dr_grpo, rows([1.0], [0.0]))
    advantages(c.dr_grpo.replace(aggregate=Constant(4)), rows([1.0], [0.0]))


def test_ends():
    book = rows([0, 0, 1.0], [0, 1.0], [0.0])
    right = np.array([[[0, 0, 1], [0, 1, 0], [1, 0, 0]]], bool)
    for end in (book.last, book.task_end, book.end):
        np.testing.assert_array_equal(end, right)
    cut = replace(book, truncated=right & (np.arange(3) == 2))
    np.testing.assert_array_equal(cut.task_end, right & (np.arange(3) < 2))
    np.testing.assert_array_equal(cut.end, right)
    assert not replace(book, mask=np.zeros_like(right)).last.any()


@given(st.integers(1, 40), st.integers(0, 999))
def test_the_doubling_scan_is_the_loop(T, seed):
    rng = np.random.default_rng(seed)
    x, decay = rng.normal(size=(2, T)), rng.random((2, T))
    y, high = np.zeros((2, T + 1)), np.full((2, T + 1), -np.inf)
    for t in reversed(range(T)):
        y[:, t] = x[:, t] + decay[:, t] * y[:, t + 1]
        high[:, t] = np.maximum(x[:, t], high[:, t + 1])
    np.testing.assert_allclose(reverse_cumulative(x, decay), y[:, :T], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(reverse_cumulative_max(x), high[:, :T])
