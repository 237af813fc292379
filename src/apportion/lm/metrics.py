"""What is measured of language-model runs: rates with intervals, pass@k, lengths of right and wrong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

SOLVED = 1.0
"""An answer is right when its first reward reaches this."""


def wilson(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Interval of a rate from 1 or more trials, 95% by default. Source: Wilson 1927.

    >>> [round(bound, 4) for bound in wilson(17, 100)]
    [0.1089, 0.2555]
    """
    p, n = successes / trials, trials
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right, from `right` among n.

    1 - C(n - right, k) / C(n, k) as a product, which no large n overflows. Source: Chen et al. 2021, eq. 1.

    >>> round(pass_at_k(10, 3, 2), 6), pass_at_k(4, 3, 2)
    (0.533333, 1.0)
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}; it must be from 1 to n = {n}")
    if n - right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - right + 1, n + 1)))


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... up to n, and n itself.

    >>> powers_of_two(6)
    [1, 2, 4, 6]
    """
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def average(values: Sequence[float] | np.ndarray) -> float | None:
    """The mean as JSON holds it: None of nothing.

    >>> average([1, 2]), average([])
    (1.5, None)
    """
    return float(np.mean(values)) if len(values) else None


def lengths(length: np.ndarray, right: np.ndarray, truncated: np.ndarray) -> dict[str, float | None]:
    """Response lengths in tokens, of all and of right and wrong answers apart, and the fraction cut at the limit.

    length, right, truncated: [N G].
    """
    return {
        "length_mean": average(length.ravel()),
        "length_right": average(length[right]),
        "length_wrong": average(length[~right]),
        "truncated_fraction": average(truncated.ravel()),
    }


def answers(right: np.ndarray) -> dict[str, Any]:
    """Accuracy and pass@k over prompts.

    right: [N G] bool, G answers a prompt. With one answer a prompt the interval is Wilson's; with more, answers of a
    prompt are not independent and the interval is the normal one over the prompts' rates.
    """
    n, g = right.shape
    rates = right.mean(1)
    if g == 1:
        low, high = wilson(int(right.sum()), n)
    else:
        half = 1.959964 * float(rates.std(ddof=1)) / math.sqrt(n) if n > 1 else 1.0
        low, high = max(0.0, float(rates.mean()) - half), min(1.0, float(rates.mean()) + half)
    found: dict[str, Any] = {"accuracy": float(rates.mean()), "accuracy_low": low, "accuracy_high": high, "prompts": n}
    if g > 1:
        for k in powers_of_two(g):
            found[f"pass@{k}"] = float(np.mean([pass_at_k(g, int(c), k) for c in right.sum(1)]))
    return found


def zero_signal(reward: np.ndarray, scored: np.ndarray) -> float | None:
    """Fraction of groups whose scored rewards are all equal: no comparison of siblings teaches from them.

    reward: [N G]; scored: [N G] bool.
    """
    spread = np.where(scored, reward, -math.inf).max(1) - np.where(scored, reward, math.inf).min(1)
    return average(~(spread > 1e-12))
