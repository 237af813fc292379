"""Collecting on the toy language: what a sampler declares decides what is drawn, kept, or taken from a data set.

Axes as in `train`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.core.method import Method
from apportion.core.parts import KeepAll
from apportion.core.rollouts import Rollouts
from apportion.toy import policy
from apportion.toy.adam import AdamState
from apportion.toy.language import Language

BETA = 0.5  # of the optimum pi* that every run is measured against, in reward per nat
Array = np.ndarray
Measures = dict[str, float]
Draw = dict[str, Array]  # a collection: responses `rows` [M, G] drawn for `prompts` [M], and the arrays of its book


@dataclass(frozen=True, eq=False)
class State:
    """All that a run needs to go on as if it had never stopped.

    logits: [N, K, V]. critic: [N, K], the table of values, read by critic methods only. beta: the KL coefficient now (a
    controller may move it). rng: state of the random generator. short: steps at which the filter's refills ran out.
    """

    logits: Array
    adam: AdamState
    critic: Array
    beta: float
    rng: Mapping[str, Any]
    step: int = 0
    short: int = 0
    rows: tuple[Measures, ...] = ()


@dataclass(frozen=True, eq=False)
class Run:
    """What does not change over a run. repeat: groups of every prompt. batch: of a pool, groups a step."""

    method: Method
    language: Language
    repeat: int
    steps: int
    optimum: policy.Tilted
    anchor: Array
    pool: Draw | None
    batch: int


def anchor(method: Method, language: Language) -> Array:
    """Logits [N, K, V] that `logref` comes from: the teacher pi* where the task's reward is not read, else pi_ref."""
    return policy.tilted(language, BETA).logits if method.sampler.feedback == "none" else language.reference


def next_values(value: Array) -> Array:
    """Value of the state after each decision [..., T], from that before it; 0 after the last."""
    return np.concatenate([value[..., 1:], np.zeros_like(value[..., :1])], axis=-1)


def _book(run: Run, sampler: Array, rows: Array, prompts: Array, reward: Array | None, value: Array | None) -> Rollouts:
    """Rollouts of `rows [M, G]` to `prompts [M]`, drawn from the logits `sampler`; reward None takes the task's."""
    language, who = run.language, prompts[:, None]
    if reward is None:
        reward = language.reward[who, rows] * (run.method.sampler.feedback != "none")
    paid = np.zeros((*rows.shape, language.L))
    np.put_along_axis(paid, language.length[rows][..., None] - 1, reward[..., None], axis=-1)
    best = policy.greedy(language, sampler)[prompts] if run.method.sampler.greedy else None
    return Rollouts(
        reward=paid,
        mask=language.mask[rows] > 0,
        logq=policy.decision_log_probs(language, sampler, rows, who),
        logref=policy.decision_log_probs(language, run.anchor, rows, who),
        value=value,
        next_value=None if value is None else next_values(value),
        greedy_return=None if best is None else language.reward[prompts, best],
        horizon=language.horizon,
    )


def preferences(language: Language, rows: Array, prompts: Array, rng: np.random.Generator) -> Array:
    """Bradley-Terry labels [M, 2]: the first of a pair is chosen (1) with probability sigmoid(r_1 - r_2)."""
    r = language.reward[prompts[:, None], rows]
    first = rng.random(len(rows)) < 1 / (1 + np.exp(r[:, 1] - r[:, 0]))
    return np.stack([first, ~first], axis=1).astype(float)


def _value(run: Run, state: State, rows: Array, prompts: Array, rng: np.random.Generator):
    """Values [M, G, T] at the states visited, where the method reads any."""
    kind, mask = run.method.sampler.values, run.language.mask[rows]
    at = (prompts[:, None, None], run.language.prefix[rows])
    if kind != "rollouts":
        return None if kind == "none" else state.critic[at] * mask
    # With 0/1 rewards a fresh rollout succeeds with exactly the state's value, so the count is binomial.
    exact = np.clip(policy.values(run.language, state.logits).state[at], 0.0, 1.0)
    return rng.binomial(K := run.method.sampler.value_rollouts, exact) / K * mask


def _draw(run: Run, state: State, rng: np.random.Generator) -> Draw:
    """One batch from the sampler: `repeat` groups of every prompt."""
    s, language = run.method.sampler, run.language
    logits = (language.reference if s.proposer == "reference" else state.logits) / s.temperature
    prompts = np.repeat(np.arange(language.prompts), run.repeat)
    rows = policy.sample(language, logits, rng, s.group, prompts)
    reward = preferences(language, rows, prompts, rng) if s.feedback == "preference" else None
    rollouts = _book(run, logits, rows, prompts, reward, _value(run, state, rows, prompts, rng))
    arrays = {k: x for k, x in vars(rollouts).items() if isinstance(x, np.ndarray)}
    return {"rows": rows, "prompts": prompts} | arrays


def take(draw: Draw, index: Array) -> Draw:
    """Some groups of a collection."""
    return {k: x[index] for k, x in draw.items()}


def rollouts_of(run: Run, draw: Draw) -> Rollouts:
    """The book of a collection."""
    arrays: dict[str, Any] = {k: x for k, x in draw.items() if k not in ("rows", "prompts")}
    return Rollouts(**arrays, horizon=run.language.horizon)


def collect(run: Run, state: State, rng: np.random.Generator) -> tuple[Draw, bool]:
    """A collection, and whether the filter left it short of a full batch."""
    if run.pool is not None:
        size = len(run.pool["rows"])
        return take(run.pool, rng.choice(size, min(run.batch, size), replace=False)), False
    batches = getattr(run.method.sampler.keep, "max_batches", None)
    if batches is None:
        return _draw(run, state, rng), False
    full, kept = run.repeat * run.language.prompts, dict[str, Array]()
    for _ in range(batches):
        draw = _draw(run, state, rng)
        stays = np.flatnonzero(np.asarray(run.method.sampler.keep(rollouts_of(run, draw))).any(axis=1))
        kept = {k: np.concatenate([kept.get(k, x[:0]), x[stays]])[:full] for k, x in draw.items()}
        if len(kept["rows"]) == full:
            break
    return kept, len(kept["rows"]) < full


def with_pool(run: Run, state: State, size: int, seed: int) -> Run:
    """The run with a data set drawn once, `size` groups a prompt, after the filter, which then keeps all.

    A filter's weight is the chance to stay. The stream is its own, so that a resumed run finds the same data.
    """
    rng = np.random.default_rng([seed, 1])
    draw = _draw(dataclasses.replace(run, repeat=size), state, rng)
    kept = run.method.sampler.keep(rollouts_of(run, draw))
    stays = (rng.random(kept.shape) < kept).all(axis=1)
    fixed = run.method.replace(name=run.method.name, sampler=run.method.sampler.replace(keep=KeepAll()))
    return dataclasses.replace(run, method=fixed, pool=take(draw, np.flatnonzero(stays)))
