"""Rates, intervals and pass@k against what enumeration gives."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from apportion.lm.metrics import answers, lengths, pass_at_k, wilson, zero_signal


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts):
    right, n = counts
    theirs = binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right, n) == pytest.approx((theirs.low, theirs.high), abs=1e-6)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(case):
    n, right, k = case
    drawn = list(itertools.combinations([True] * right + [False] * (n - right), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))


def test_pass_at_k_is_stable_for_many_answers():
    exact = 1 - math.comb(9_990, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(exact, rel=1e-12)
    with pytest.raises(ValueError, match="k is 5"):
        pass_at_k(4, 1, 5)


def test_answers_and_lengths():
    right = np.array([[True, False], [True, True], [False, False]])
    found = answers(right)
    assert found["accuracy"] == 0.5
    assert found["pass@1"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert 0 <= found["accuracy_low"] < 0.5 < found["accuracy_high"] <= 1
    one = answers(right[:, :1])
    assert (one["accuracy_low"], one["accuracy_high"]) == wilson(2, 3)
    told = lengths(np.array([[1, 2], [3, 4], [5, 6]]), right, np.zeros((3, 2), bool))
    assert (told["length_mean"], told["length_right"], told["length_wrong"]) == (3.5, 8 / 3, 13 / 3)
    assert lengths(np.ones((1, 1)), np.zeros((1, 1), bool), np.zeros((1, 1), bool))["length_right"] is None


def test_groups_without_signal():
    reward = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 0.0], [0.3, 0.1 + 0.2]])
    scored = np.array([[True, True], [True, True], [True, False], [True, True]])
    assert zero_signal(reward, scored) == 0.75
