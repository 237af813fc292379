"""Statistics against hand calculations, SciPy, and properties that hold for any scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from apportion.study import statistics as s

runs = st.lists(st.integers(-5, 5), min_size=1, max_size=7).map(lambda x: np.array(x, float))
tasks = st.lists(runs, min_size=2, max_size=2)


def test_the_middle_half_of_all_runs_of_all_tasks():
    a, b = np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 11.0, 12.0, -90.0])
    assert s.iqm(a, b) == pytest.approx((1 + 2 + 3 + 10) / 4)  # of 8 runs, 2 go at each end
    assert s.iqm(np.array([4.0])) == 4
    assert s.median(a, b, np.array([3.0])) == 1.5  # of the task means 1.5, -14.25, 3
    assert s.mean(a, b) == (1.5 - 14.25) / 2


def test_runs_are_redrawn_within_their_task():
    """If they were redrawn over tasks, the share of the second task would vary."""
    scores = [np.zeros(5), np.ones(5)]
    assert s.estimate(s.mean, scores) == (0.5, 0.5, 0.5)
    assert s.estimate(s.iqm, scores) == (0.5, 0.5, 0.5)


def test_the_interval_of_a_mean_is_that_of_scipy():
    from scipy.stats import bootstrap

    x = np.random.default_rng(0).normal(size=12)
    ours = s.estimate(s.mean, [x])
    theirs = bootstrap((x,), np.mean, n_resamples=20_000, method="percentile", rng=1).confidence_interval
    assert ours.value == pytest.approx(x.mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=0.05)


def test_the_interval_covers_as_often_as_it_says():
    """20 normal runs: a percentile interval covers a little less than 95%."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        e = s.estimate(s.mean, [rng.normal(size=20)])
        covered += e.low <= 0 <= e.high
    assert 0.85 < covered / 200 < 0.99


@given(runs, runs)
def test_improvement_is_mann_and_whitneys(x, y):
    e = s.improvement([x], [y])
    assert e.value == pytest.approx(mannwhitneyu(x, y).statistic / (len(x) * len(y)))
    assert e.value + s.improvement([y], [x]).value == pytest.approx(1)
    assert 0 <= e.low <= e.high <= 1


@given(tasks, st.permutations(range(7)))
def test_the_order_of_runs_does_not_matter(scores, order):
    shuffled = [x[[i for i in order if i < len(x)]] for x in scores]
    for f in (s.iqm, s.mean, s.median):
        assert f(*shuffled) == pytest.approx(f(*scores))
    assert min(x.min() for x in scores) - 1e-9 <= s.iqm(*scores) <= max(x.max() for x in scores) + 1e-9


@given(tasks)
def test_a_profile_falls_from_one_to_nothing(scores):
    value, low, high = s.profile(scores, np.linspace(-6, 6, 25))
    assert value[0] == 1
    assert value[-1] == 0
    assert np.all(np.diff(value) <= 1e-12)
    assert np.all((low <= value + 0.5) & (low <= high))


def test_the_paired_test_counts_the_ways_to_flip_signs():
    assert s.paired_p(np.array([1.0, 2.0, 3.0])) == pytest.approx(2 / 8)
    assert s.paired_p(np.array([1.0, -1.0])) == 1
    assert s.paired_p(np.zeros(4)) == 1
    assert s.paired_p(np.arange(1.0, 15.0)) < 0.001  # drawn, not counted


def test_holm_is_monotone_and_no_smaller_than_p():
    p = [0.001, 0.2, 0.01, 0.04]
    assert s.holm(p) == pytest.approx([0.004, 0.2, 0.03, 0.08])
    assert s.holm([0.9, 0.8]) == [1.0, 1.0]
    assert s.holm([]) == []
