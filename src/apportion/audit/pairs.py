"""Exact expected weights of preference methods: every ordered pair, without writing the pairs down.

A pair's weight depends on its two log-ratios alone, smoothly. It is therefore interpolated between Chebyshev nodes
whose pairs the real `weights` has weighed; the number of nodes is chosen so that the rest is below rounding.
"""

from __future__ import annotations

from math import ceil, log, pi, sqrt

import numpy as np

from apportion.audit.tables import Tables
from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.core.parts import Constant, PairLogistic, Sum
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights

PRECISION = 1e-12
MOST_NODES = 128


def weigh_pairs(method: Method, tables: Tables, precision: float = PRECISION) -> np.ndarray:
    """Weight [N, S, L] of each response of a labelled pair, averaged over the other and over the label.

    Raises ApportionError where a part would make a pair's weight depend on more than the two log-ratios.
    """
    for part in (method.aggregate, method.scale, method.baseline):
        if part.scope == "batch" or (part is method.aggregate and not isinstance(part, (Sum, Constant))):
            raise ApportionError(
                f"{type(part).__name__}() with PairLogistic cannot be audited: it couples pairs, or weighs them by "
                "length; use aggregate=Sum() or Constant() and parts that stay within the pair"
            )
    assert isinstance(method.trust, PairLogistic)
    mask = tables.language.mask
    h = ((tables.logp - tables.logref) * mask).sum(axis=-1)
    out = np.empty(h.shape)
    for n, (ratio, reward, q) in enumerate(zip(h, tables.language.reward, tables.mass, strict=True)):
        low, high = ratio.min(), max(ratio.max(), ratio.min() + 1e-6)
        count = _nodes(method.trust.beta * (high - low) / 2, precision)
        basis, x = _interpolate((2 * ratio - low - high) / (high - low), count)
        chosen, rejected = _grid(method, (low + high + (high - low) * x) / 2, tables.language.horizon)
        out[n] = _averaged(basis, reward, q, chosen, rejected)
    return out[..., None] * mask


def _nodes(half_width: float, precision: float) -> int:
    """Chebyshev nodes for a logistic over [-half_width, half_width]: its poles, at ±i pi, bound the convergence."""
    pole = pi / max(half_width, 1e-3)
    rate = log(pole + sqrt(1 + pole * pole))
    return min(ceil(-log(precision) / rate) + 2, MOST_NODES)


def _interpolate(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lagrange basis [S, count] at `x` in [-1, 1] of the Chebyshev nodes [count]."""
    angle = (np.arange(count) + 0.5) * pi / count
    degree = np.arange(count)
    at_nodes = np.cos(degree[:, None] * angle) * (2.0 / count)
    at_nodes[0] /= 2
    return np.cos(degree * np.arccos(np.clip(x, -1.0, 1.0))[:, None]) @ at_nodes, np.cos(angle)


def _grid(method: Method, h: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """w of the chosen and of the rejected, [chosen, rejected], for log-ratios `h` of one-decision responses."""
    c, r = (x.ravel() for x in np.meshgrid(h, h, indexing="ij"))
    logp = np.stack([c, r], axis=1)[..., None]
    labels = np.broadcast_to(np.array([1.0, 0.0])[None, :, None], logp.shape)
    zeros = np.zeros(logp.shape)
    book = Rollouts(reward=labels, mask=zeros == 0, logq=zeros, logref=zeros, mass=np.ones(len(c)), horizon=horizon)
    w = np.asarray(weights(method, advantages(method, book), logp).w)[..., 0] * len(c)
    return tuple(w.reshape(len(h), len(h), 2).transpose(2, 0, 1))  # type: ignore[return-value]


def _averaged(basis: np.ndarray, reward: np.ndarray, q: np.ndarray, chosen: np.ndarray, rejected: np.ndarray):
    """Weight [S] of each response, over the other of its pair and the Bradley-Terry label."""
    total = np.zeros(len(reward))
    for other in np.unique(reward):
        mass = (q * (reward == other)) @ basis
        wins = 1 / (1 + np.exp(other - reward))
        total += wins * (basis @ (chosen @ mass)) + (1 - wins) * (basis @ (rejected.T @ mass))
    return 2 * total
