"""The tabular softmax policy on the toy language: exact distributions, gradients and values.

Pure functions of logits `[N, K, V]`. Axes as in `language`: `N` prompts, `S` responses, `L` decisions, `K`
prefixes, `V` tokens. Logs are natural; KL is in nats per response; a reward is per response.

Functions on responses take optional `rows` and `prompts`. Without them they run over the whole enumeration,
`[N, S]`. With `rows`, an int array of response indices of any shape, they touch only those. `prompts`
broadcasts against `rows` and defaults to one prompt per leading row: a sampled batch is just `rows [N, G]`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.core.errors import ApportionError
from apportion.toy.language import Language

_BELOW_ONE = np.nextafter(1.0, 0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities along the last axis, same shape."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _prompts(rows: np.ndarray, prompts: np.ndarray | None) -> np.ndarray:
    """The prompt of each row, ready to broadcast against `rows` of any shape."""
    if prompts is not None:
        return np.asarray(prompts)
    return np.arange(rows.shape[0]).reshape(-1, *[1] * (rows.ndim - 1))


# --- distributions ---------------------------------------------------------------------------------------


def _decision_rows(language: Language, logits: np.ndarray, rows: np.ndarray, prompts: np.ndarray | None):
    """Log-softmax at the prefixes of the given responses [..., L, V], and the token taken [..., L, 1]."""
    visited = logits[_prompts(rows, prompts)[..., None], language.prefix[rows]]
    return log_softmax(visited), language.sequences[rows][..., None]


def decision_log_probs(
    language: Language, logits: np.ndarray, rows: np.ndarray | None = None, prompts: np.ndarray | None = None
) -> np.ndarray:
    """Log-probability of each decision, [N, S, L] (or `rows.shape + (L,)`); 0 where masked."""
    if rows is None:
        flat = log_softmax(logits).reshape(len(logits), -1)
        return np.where(language.mask > 0, flat[:, language.edge], 0.0)
    log_p, token = _decision_rows(language, logits, rows, prompts)
    taken = np.take_along_axis(log_p, token, axis=-1)[..., 0]
    return np.where(language.mask[rows] > 0, taken, 0.0)


def edge_log_mass(language: Language, logits: np.ndarray) -> np.ndarray:
    """Log-probability that a response passes through each (prefix, token), [N, K, V].

    A sweep down the tree: a level's prefixes are the continuing edges of the level above, in order.
    """
    log_p = log_softmax(logits)
    passed = np.empty_like(log_p)
    reach = np.zeros((len(logits), 1))
    for level in language.levels:
        passed[:, level] = reach[:, :, None] + log_p[:, level]
        reach = passed[:, level, : language.branching].reshape(len(logits), -1)
    return passed


def prefix_mass(language: Language, logits: np.ndarray) -> np.ndarray:
    """Probability that a response passes through each prefix, [N, K]; it sums to the mean length."""
    return np.exp(edge_log_mass(language, logits)).sum(axis=-1)


def sequence_log_probs(language: Language, logits: np.ndarray) -> np.ndarray:
    """Log-probability of every response, [N, S]."""
    return edge_log_mass(language, logits).reshape(len(logits), -1)[:, language.end]


def mass(language: Language, logits: np.ndarray) -> np.ndarray:
    """Probability of every response, [N, S]; each prompt sums to one."""
    return np.exp(sequence_log_probs(language, logits))


def expected_reward(language: Language, logits: np.ndarray) -> np.ndarray:
    """Expected reward of each prompt, [N]; with 0/1 rewards, its success rate."""
    return (mass(language, logits) * language.reward).sum(axis=-1)


def kl(p_log: np.ndarray, q_log: np.ndarray) -> np.ndarray:
    """Exact KL(p || q) in nats over the last axis of two log-probability arrays: [N, S], [N, S] -> [N]."""
    p = np.exp(p_log)
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(p > 0, p_log - q_log, 0.0)  # 0 log 0 = 0
    return (p * log_ratio).sum(axis=-1)


class MeanLength(NamedTuple):
    """Exact mean lengths in decisions, each [N]; nan where a prompt has no such response."""

    correct: np.ndarray
    wrong: np.ndarray


def mean_length(language: Language, logits: np.ndarray) -> MeanLength:
    """Mean length of the correct and of the wrong responses of each prompt."""
    p = mass(language, logits)
    correct, wrong = p * language.reward, p * (1.0 - language.reward)
    with np.errstate(invalid="ignore"):
        return MeanLength(*((q @ language.length) / q.sum(axis=-1) for q in (correct, wrong)))


# --- any distribution is a policy ------------------------------------------------------------------------


def logits_of(language: Language, sequence_log: np.ndarray) -> np.ndarray:
    """The policy of a distribution over responses: [N, S] log-probabilities -> [N, K, V] log conditionals.

    The sweep of `edge_log_mass` backwards. A prefix of zero mass gets a uniform conditional.
    """
    N, B = len(sequence_log), language.branching
    flat = np.full((N, language.prefixes * language.V), -np.inf)
    flat[:, language.end] = sequence_log
    passed = flat.reshape(N, language.prefixes, language.V)
    for above, below in zip(language.levels[-2::-1], language.levels[:0:-1], strict=True):
        passed[:, above, :B] = np.logaddexp.reduce(passed[:, below], axis=-1).reshape(N, -1, B)
    unreachable = np.isneginf(passed).all(axis=-1, keepdims=True)
    return log_softmax(np.where(unreachable, 0.0, passed))


class Tilted(NamedTuple):
    """The optimum of E[r] - beta KL(pi || pi_ref)."""

    log_probs: np.ndarray
    """[N, S]: pi* proportional to pi_ref exp(r / beta)."""
    logits: np.ndarray
    """[N, K, V]: the same distribution as a policy."""
    log_partition: np.ndarray
    """[N]: log Z, so that the objective at pi* is beta log Z."""


def tilted(language: Language, beta: float) -> Tilted:
    """The optimum at penalty `beta` > 0 (in reward per nat); `inf` gives the reference back."""
    if not beta > 0:
        raise ApportionError(f"beta is {beta!r}; the optimum exists for beta > 0 (inf gives the reference)")
    raised = sequence_log_probs(language, language.reference) + language.reward / beta
    log_partition = np.logaddexp.reduce(raised, axis=-1)
    log_probs = raised - log_partition[:, None]
    return Tilted(log_probs, logits_of(language, log_probs), log_partition)


# --- the score and the gradient --------------------------------------------------------------------------


def score_sum(
    language: Language,
    logits: np.ndarray,
    weight: np.ndarray,
    rows: np.ndarray | None = None,
    prompts: np.ndarray | None = None,
) -> np.ndarray:
    """Sum of `weight * grad log pi` over responses and decisions, [N, K, V]: the toy domain's one loss line.

    `weight` is [N, S, L], or `rows.shape + (L,)`. The score of a softmax is `onehot(token) - p`, so weights
    are added up on the tokens taken, and each prefix's total comes off in proportion to p. Masked decisions
    have no score whatever their weight.
    """
    N, K, V = logits.shape
    if rows is None:
        rows = np.broadcast_to(np.arange(len(language.sequences)), (N, len(language.sequences)))
    base = _prompts(rows, prompts) * (K * V)
    edge = base[..., None] + language.edge[rows]
    live = np.broadcast_to(weight, edge.shape) * language.mask[rows]
    taken = np.bincount(edge.ravel(), weights=live.ravel(), minlength=N * K * V).reshape(N * K, V)
    total = taken.sum(axis=-1)
    touched = np.flatnonzero(total)  # a batch visits few prefixes: the softmax is needed only there
    p = np.exp(log_softmax(logits.reshape(N * K, V)[touched]))
    taken[touched] -= p * total[touched, None]
    return taken.reshape(N, K, V)


def score_norm2(
    language: Language, logits: np.ndarray, rows: np.ndarray | None = None, prompts: np.ndarray | None = None
) -> np.ndarray:
    """Squared norm of each decision's score, `1 - 2 p(token) + sum p**2`, [N, S, L]; 0 where masked."""
    if rows is None:
        p = np.exp(log_softmax(logits))
        norm2 = 1.0 - 2.0 * p + (p * p).sum(axis=-1, keepdims=True)
        return norm2.reshape(len(logits), -1)[:, language.edge] * language.mask
    log_p, token = _decision_rows(language, logits, rows, prompts)
    p = np.exp(log_p)
    taken = np.take_along_axis(p, token, axis=-1)[..., 0]
    return (1.0 - 2.0 * taken + (p * p).sum(axis=-1)) * language.mask[rows]


class Gradient(NamedTuple):
    """Exact gradient, each part [N, K, V]. Prompts share no parameters, so row n is prompt n's own gradient
    and the whole array is the gradient of the *sum* over prompts (divide by N for the mean)."""

    total: np.ndarray
    """reward - beta * kl"""
    reward: np.ndarray
    """gradient of E[r]"""
    kl: np.ndarray
    """gradient of KL(pi || pi_ref)"""


def true_gradient(language: Language, logits: np.ndarray, beta: float = 0.0) -> Gradient:
    """Exact gradient of J = E[r] - beta KL(pi || pi_ref)."""
    log_p = sequence_log_probs(language, logits)
    log_ratio = log_p - sequence_log_probs(language, language.reference)
    p = np.exp(log_p)
    reward = score_sum(language, logits, (p * language.reward)[..., None])
    penalty = score_sum(language, logits, (p * log_ratio)[..., None])
    return Gradient(reward - beta * penalty, reward, penalty)


# --- values ----------------------------------------------------------------------------------------------


def decision_reward(language: Language) -> np.ndarray:
    """The task's reward as a table of decisions, [N, K, V]: paid on the token that completes a response."""
    table = np.zeros((language.prompts, language.prefixes * language.V))
    table[:, language.end] = language.reward
    return table.reshape(language.prompts, language.prefixes, language.V)


class Values(NamedTuple):
    """Expected return-to-go, undiscounted."""

    state: np.ndarray
    """[N, K]: before the decision at each prefix."""
    action: np.ndarray
    """[N, K, V]: after choosing each token there, that token's own reward included."""


def values(language: Language, logits: np.ndarray, table: np.ndarray | None = None) -> Values:
    """Exact values under the policy of a reward per (prefix, token), [N, K, V]; by default the task's own."""
    p = np.exp(log_softmax(logits))
    action = np.array(decision_reward(language) if table is None else np.broadcast_to(table, p.shape))
    state = np.empty(p.shape[:2])
    ahead = None
    for level in reversed(language.levels):
        if ahead is not None:
            action[:, level, : language.branching] += ahead.reshape(len(p), -1, language.branching)
        ahead = (p[:, level] * action[:, level]).sum(axis=-1)
        state[:, level] = ahead
    return Values(state, action)


def conditional_mean(language: Language, logits: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Mean of a quantity `x [N, S, L]` of decisions given the prefix they are made at, [N, K].

    `x` may depend on what is said later: with returns-to-go it is the value function of any per-response,
    per-decision reward. 0 at a prefix that is never reached.
    """
    N = len(logits)
    live = np.where(language.mask > 0, x, 0.0) * mass(language, logits)[..., None]
    prefix = np.arange(N)[:, None, None] * language.prefixes + language.prefix
    total = np.bincount(prefix.ravel(), weights=live.ravel(), minlength=N * language.prefixes)
    reached = prefix_mass(language, logits)
    return np.divide(total.reshape(reached.shape), reached, out=np.zeros_like(reached), where=reached > 0)


# --- speaking --------------------------------------------------------------------------------------------


def sample(
    language: Language,
    logits: np.ndarray,
    rng: np.random.Generator,
    G: int,
    prompts: np.ndarray | None = None,
) -> np.ndarray:
    """Draw G responses for each prompt, int [N, G] (or [len(prompts), G]).

    Inverse of the cumulative distribution over responses in lexicographic order, one uniform per response;
    walking the tree finds the same response without enumerating the others.
    """
    who = (np.arange(len(logits)) if prompts is None else np.asarray(prompts))[:, None]
    uniform = rng.random((len(who), G))
    at = np.zeros(uniform.shape, dtype=np.int64)
    for _ in range(language.L):
        here = np.maximum(at, 0)
        cumulative = np.exp(log_softmax(logits[who, here])).cumsum(axis=-1)
        cumulative /= cumulative[..., -1:]
        token = (uniform[..., None] >= cumulative[..., :-1]).sum(axis=-1)
        edges = np.concatenate([np.zeros((*token.shape, 1)), cumulative], axis=-1)
        low = np.take_along_axis(edges, token[..., None], axis=-1)[..., 0]
        high = np.take_along_axis(edges, token[..., None] + 1, axis=-1)[..., 0]
        uniform = np.minimum((uniform - low) / (high - low), _BELOW_ONE)
        at = np.where(at >= 0, language.child[here, token], at)  # a completed response stays put
    return ~at


def greedy(language: Language, logits: np.ndarray) -> np.ndarray:
    """The response that takes the likeliest token at every decision, int [N]; ties go to the lower token."""
    best = logits.argmax(axis=-1)
    who = np.arange(len(logits))
    at = np.zeros(len(logits), dtype=np.int64)
    for _ in range(language.L):
        here = np.maximum(at, 0)
        at = np.where(at >= 0, language.child[here, best[who, here]], at)
    return ~at
