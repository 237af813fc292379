"""Figures 1, 2, 6, 7 and 8: expectations, computed as sums. Published numbers: the testbed's, with its corrections."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np

from apportion.audit.expectation import expected_update, moments, true_gradient
from apportion.audit.figures.rows import Figure, Plot, Row, Series
from apportion.core.catalogue import dr_grpo, grpo, reinforce, rloo
from apportion.core.method import Method
from apportion.core.parts import Critic, GroupStd, NoKL, NoRatio, NoTrust, Sum
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights
from apportion.toy import policy
from apportion.toy.language import Language, language

G = 8
TEMPERATURES = (None, 3.0, 1.0, 0.6, 0.3, 0.18, 0.12)
PLAIN = {"kl": NoKL(), "aggregate": Sum(), "ratio": NoRatio(), "trust": NoTrust()}
LEAVE_ONE_OUT = rloo.replace(name="leave-one-out", kl=NoKL())
GROUP_MEAN = dr_grpo.replace(name="group mean, itself included", **PLAIN)
GRPO = grpo.replace(name="GRPO (population std)", scale=GroupStd(ddof=0, eps=1e-8), **PLAIN)


def zero_signal() -> Figure:
    """Figure 1: the chance that a group of eight says nothing."""
    lang = language("toy")
    success = policy.expected_reward(lang, lang.reference)
    silent = moments(grpo.set("kl.beta", 0.0), lang, lang.reference, G).silent
    published = (0.869, 0.19, 0.063, 0.011)
    rows = [
        Row(1, f"zero signal, prompt {n} (success {p:.3f})", q, float(x), 1e-3)
        for n, (p, q, x) in enumerate(zip(success, published, silent, strict=True))
    ]
    grid = np.linspace(0, 1, 101)
    curve = Series("p^8 + (1-p)^8", grid.tolist(), (grid**8 + (1 - grid) ** 8).tolist())
    points = Series("the audit, four prompts", success.tolist(), silent.tolist(), "markers")
    plot = Plot("1. Groups of eight that say nothing", "success rate", "probability", [curve, points])
    return Figure(1, rows, plot)


@cache
def difficulty(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Success rate and weight of every prompt at every policy with success between .01 and .99."""
    method = {m.name: m for m in (LEAVE_ONE_OUT, GROUP_MEAN, GRPO)}[name]
    lang = language("toy")
    found: list[tuple[float, float]] = []
    for beta in TEMPERATURES:
        logits = lang.reference if beta is None else policy.tilted(lang, beta).logits
        update, true = expected_update(method, lang, logits, G), true_gradient(method, lang, logits)
        weight = (update * true).sum(axis=(1, 2)) / (true**2).sum(axis=(1, 2))
        success = policy.expected_reward(lang, logits)
        found += [(float(p), float(w)) for p, w in zip(success, weight, strict=True) if 0.01 < p < 0.99]
    found.sort()
    return tuple(p for p, _ in found), tuple(w for _, w in found)


def difficulty_weight() -> Figure:
    """Figure 2: how hard each prompt pushes, in units of its own gradient."""
    bound = math.sqrt(G - 1)
    (_, loo), (_, mean), (p, std) = (difficulty(m.name) for m in (LEAVE_ONE_OUT, GROUP_MEAN, GRPO))
    even = std[int(np.argmin(np.abs(np.array(p) - 0.5)))]
    rows = [
        Row(2, "leave-one-out, farthest from 1", 1.0, max(loo, key=lambda x: abs(x - 1)), 1e-9),
        Row(2, "group mean, farthest from 7/8", 7 / 8, max(mean, key=lambda x: abs(x - 7 / 8)), 1e-9),
        Row(2, "GRPO at the prompt nearest 50%", 1.88, even, 0.03, remark="published from 1,500 draws"),
        Row(
            2,
            "GRPO, largest",
            2.68,
            max(std),
            None,
            remark=f"published 2.68 is above the bound sqrt(7) = {bound:.4f}: Monte Carlo noise",
            correction=True,
        ),
    ]
    series = [Series(m.name, *difficulty(m.name), "markers") for m in (LEAVE_ONE_OUT, GROUP_MEAN, GRPO)]
    series.append(Series("bound sqrt(7)", [0.0, 1.0], [bound, bound]))
    plot = Plot("2. Weight of a prompt by its difficulty, G = 8", "success rate", "update / true gradient", series)
    return Figure(2, rows, plot)


def _two_actions(left: float, right: float) -> float:
    """Mean push on the logit of Left by a baseline of those heights; Left .3, Right .7, scores +.7 and -.3."""
    method = reinforce.replace(
        baseline=Critic(), sampler=reinforce.sampler.replace(values="rollouts"), name="baseline of the action"
    )
    shape, mass = (2, 1, 1), np.array([0.3, 0.7])
    value = np.array([left, right]).reshape(shape)
    zeros = np.zeros(shape)
    book = Rollouts(
        reward=zeros,
        mask=zeros == 0,
        logq=np.log(mass).reshape(shape),
        value=value,
        next_value=zeros,
        mass=mass,
        horizon=1,
    )
    w = np.asarray(weights(method, advantages(method, book), book.logq).w).ravel()
    return 0.0 - float(w @ np.array([0.7, -0.3]))  # the baseline is subtracted, and there is no reward


def two_actions() -> Figure:
    """Figure 6: a baseline may not look at the action."""
    heights = np.linspace(-3, 3, 25)
    rows = [
        Row(6, "constant baseline", 0.0, _two_actions(2.0, 2.0), 1e-12),
        Row(6, "baseline 3 larger for Left", 0.63, _two_actions(3.0, 0.0), 1e-12),
    ]
    line = Series("what is left", heights.tolist(), [_two_actions(float(h), 0.0) for h in heights])
    plot = Plot("6. What a baseline leaves behind", "baseline of Left minus Right", "mean push on Left", [line])
    return Figure(6, rows, plot)


def _group(method: Method, correct: int, size: int):
    r = (np.arange(size) < correct).astype(float).reshape(1, size, 1)
    book = Rollouts(reward=r, mask=r == r, logq=0 * r, logref=0 * r, horizon=1)
    ledger = advantages(method, book)
    return np.asarray(ledger.advantage).ravel(), float(np.asarray(ledger.scale).ravel()[0])


def groups() -> Figure:
    """Figure 7: advantages of one group."""
    std, _ = _group(GRPO, 1, 4)
    mean, _ = _group(dr_grpo, 1, 4)
    harder = _group(GRPO, 4, 8)[1] / _group(GRPO, 1, 8)[1]
    rows = [
        Row(7, "GRPO, the right one of four", 1.73, float(std[0]), 5e-3),
        Row(7, "GRPO, the wrong ones", -0.58, float(std[1]), 5e-3),
        Row(7, "Dr. GRPO, the right one", 0.75, float(mean[0]), 1e-12),
        Row(7, "Dr. GRPO, the wrong ones", -0.25, float(mean[1]), 1e-12),
        Row(7, "1 in 8 against 4 in 8: division by the std", 1.51, harder, 5e-3),
    ]
    names = ["right", "wrong", "wrong ", "wrong  "]
    series = [Series("GRPO", names, std.tolist(), "bars"), Series("Dr. GRPO", names, mean.tolist(), "bars")]
    return Figure(7, rows, Plot("7. Rewards 1, 0, 0, 0", "sibling", "advantage", series))


def shifted(lang: Language, offset: float) -> Language:
    """The same language with `offset` added to every reward."""
    return dataclasses.replace(lang, reward=lang.reward + offset)


def relative_error(method: Method, logits: np.ndarray, offset: float) -> float:
    """Mean squared error of one update (G = 8, four prompts) over the squared norm of the gradient of E[R]."""
    lang = shifted(language("toy"), offset)
    found, true = moments(method, lang, logits, G), true_gradient(method, lang, logits)
    return float((found.variance + ((found.update - true) ** 2).sum()) / (true**2).sum())


def variance_by_baseline() -> Figure:
    """Figure 8: what a baseline is good for, and when."""
    lang = language("toy")
    start, good = lang.reference, policy.tilted(lang, 0.5).logits
    offsets = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)
    plain = [relative_error(reinforce, start, o) for o in offsets]
    loo = [relative_error(LEAVE_ONE_OUT, start, o) for o in offsets]
    mean = [relative_error(GROUP_MEAN, start, o) for o in offsets]
    late = [relative_error(m, good, 0.0) for m in (reinforce, LEAVE_ONE_OUT)]
    named = "the published '85%-correct policy' is pi*_.5 (mean success .64)"
    rows = [
        Row(8, "no baseline, rewards 0/1", 1.23, plain[0], 0.05, remark="published from 1,500 draws"),
        Row(8, "no baseline, every reward + 3", 79.0, plain[-1], 2.0, remark="published from 1,500 draws"),
        Row(8, "leave-one-out, rewards 0/1", 1.67, loo[0], 0.05, remark="published: baselines 1.45 to 1.67"),
        Row(8, "leave-one-out, change when every reward + 3", 0.0, loo[-1] - loo[0], 1e-9),
        Row(8, "no baseline at pi*", 3.58, late[0], 0.1, remark=named),
        Row(8, "leave-one-out at pi*", 2.88, late[1], 0.15, remark="published: baselines 2.53 to 2.88"),
    ]
    series = [
        Series("no baseline", offsets, plain),
        Series("leave-one-out", offsets, loo),
        Series("group mean", offsets, mean),
    ]
    plot = Plot(
        "8. Error of one update by baseline", "added to every reward", "relative mean squared error", series, "y"
    )
    return Figure(8, rows, plot)
