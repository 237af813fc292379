"""Statistics of scores from a few seeds, by the definitions of rliable 1.2.0 (Agarwal et al. 2021).

Scores of one method are a list with one array a task: [runs] numbers, the number of runs may differ between tasks.
Intervals are percentile bootstrap intervals that resample runs within each task (stratified).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Scores = Sequence[np.ndarray]
REPETITIONS = 2_000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A number and its 95% interval."""

    value: float
    low: float
    high: float


def iqm(*tasks: np.ndarray) -> np.ndarray:
    """Interquartile mean: the mean of the middle half of all runs of all tasks; over the last axis, [..., runs].

    >>> float(iqm(np.array([0.0, 1.0, 2.0, 100.0])))
    1.5
    """
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(np.concatenate(tasks, axis=-1), 0.25, axis=-1))


def median(*tasks: np.ndarray) -> np.ndarray:
    """Median over tasks of the mean over runs, as rliable has it."""
    return np.median(np.stack([x.mean(axis=-1) for x in tasks]), axis=0)


def mean(*tasks: np.ndarray) -> np.ndarray:
    """Mean over tasks of the mean over runs."""
    return np.mean(np.stack([x.mean(axis=-1) for x in tasks]), axis=0)


def resampled(scores: Scores, repetitions: int = REPETITIONS, seed: int = 0) -> list[np.ndarray]:
    """Bootstrap samples of each task, [repetitions, runs]: runs drawn with replacement within their task."""
    rng = np.random.default_rng(seed)
    return [x[rng.integers(len(x), size=(repetitions, len(x)))] for x in scores]


def estimate(statistic: Callable[..., np.ndarray], scores: Scores, seed: int = 0) -> Estimate:
    """The statistic of the scores with its stratified bootstrap interval; the value three times for single runs."""
    value = float(statistic(*scores))
    return Estimate(value, *_percentiles(statistic(*resampled(scores, seed=seed))))


def _percentiles(drawn: np.ndarray) -> tuple[float, float]:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return float(low), float(high)


def _improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """P(X > Y) + P(X = Y) / 2 of two samples, over the last axes [..., n] and [..., m]: Mann-Whitney's U / nm."""
    a, b = x[..., :, None], y[..., None, :]
    return ((a > b) + 0.5 * (a == b)).mean(axis=(-2, -1))


def improvement(x: Scores, y: Scores, seed: int = 0) -> Estimate:
    """Probability that a run of x beats one of y on the same task (a tie counts half), mean over tasks.

    >>> improvement([np.array([2.0, 3.0])], [np.array([0.0, 2.0])]).value
    0.875
    """

    def over_tasks(a: Scores, b: Scores) -> np.ndarray:
        return np.mean([_improvement(p, q) for p, q in zip(a, b, strict=True)], axis=0)

    drawn = over_tasks(resampled(x, seed=seed), resampled(y, seed=seed + 1))
    return Estimate(float(over_tasks(x, y)), *_percentiles(drawn))


def profile(scores: Scores, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Performance profile: the fraction of runs above each level [K], mean over tasks; with its interval's edges.

    >>> profile([np.array([0.0, 1.0])], np.array([-1.0, 0.5, 1.0]))[0].tolist()
    [1.0, 0.5, 0.0]
    """

    def above(tasks: Scores) -> np.ndarray:
        return np.mean([(x[..., None] > levels).mean(axis=-2) for x in tasks], axis=0)

    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(above(resampled(scores)), [tail, 100 - tail], axis=0)
    return above(scores), low, high


def paired_p(differences: np.ndarray) -> float:
    """Two-sided p of a mean difference by flipping the signs of the pairs [n]: exact up to 13 pairs, else 10,000 draws.

    >>> round(paired_p(np.array([1.0, 1.0, 1.0, 1.0, 1.0])), 4)  # 2 of 2^5 ways are as extreme
    0.0625
    """
    from scipy.stats import permutation_test

    if len(differences) < 2 or not np.any(differences):
        return 1.0
    found = permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=10_000, vectorized=True, rng=0
    )
    return float(found.pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's step-down rule.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    out, worst = [0.0] * len(p), 0.0
    for rank, i in enumerate(np.argsort(p, kind="stable")):
        worst = max(worst, min(1.0, (len(p) - rank) * p[i]))
        out[i] = worst
    return out


def reached(x: np.ndarray, curve: np.ndarray, level: float) -> float:
    """The first of x [K] at which the curve [K] is at the level or above; infinite when it never is.

    >>> reached(np.array([10, 20, 30]), np.array([0.0, 5.0, 4.0]), 5.0)
    20.0
    """
    at = np.flatnonzero(curve >= level)
    return float(x[at[0]]) if len(at) else float("inf")


def middle(steps: np.ndarray) -> float:
    """The median of steps [runs] of which some are infinite: infinite when half or more never got there.

    >>> middle(np.array([10.0, 20.0, np.inf])), middle(np.array([10.0, np.inf]))
    (20.0, inf)
    """
    return float(np.median(steps))
