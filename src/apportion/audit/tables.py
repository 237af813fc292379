"""The whole language as one book: every response of every prompt with its probability, for one policy and one method.

Axes: `N` prompts, `S` responses, `L` decisions. The audit never rewrites a formula of a method: it hands such books,
with their exact masses, to the same `advantages` and `weights` that training uses.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError, ApportionWarning
from apportion.core.method import Method
from apportion.core.parts import GAE, KL, BatchStd, NoKL, RewardToGo, Sum, Total
from apportion.core.rollouts import Rollouts
from apportion.core.weigh import advantages, weights
from apportion.toy import policy
from apportion.toy.collect import anchor, next_values
from apportion.toy.language import Language

MOST_SIBLINGS = 128
"""Largest group that is audited: the books grow with its square."""


@dataclass(frozen=True, eq=False)
class Tables:
    """What can happen, [N, S, L] unless said otherwise."""

    language: Language
    logits: np.ndarray
    """[N, K, V]: the policy that is updated."""
    sampled: np.ndarray
    """[N, K, V]: the logits of q."""
    mass: np.ndarray
    """[N, S]: probability of each response under q."""
    reward: np.ndarray
    logp: np.ndarray
    logq: np.ndarray
    logref: np.ndarray
    value: np.ndarray | None = None
    best: np.ndarray | None = None
    """[N]: return of the greedy response."""

    def book(self, prompts: np.ndarray, rows: np.ndarray, mass: np.ndarray) -> Rollouts:
        """Groups `rows [R, G]` of the prompts `[R]`, with the probability of each group, `[R]`."""
        at = (prompts[:, None], rows)
        return self._rollouts(lambda x: np.asfortranarray(x[at]), self.language.mask[rows] > 0, prompts, mass)

    def led(self, prompts: np.ndarray, lead: np.ndarray, totals: np.ndarray, mass: np.ndarray) -> Rollouts:
        """Groups of one response `lead [R]` and stand-ins for its siblings, known by their returns `[R, G-1]` alone.

        Stand-ins are outside the mask: parts that count or average decisions see the leaders only, whose decisions
        are the population's, while parts that compare returns see all.
        """
        shape = (len(lead), totals.shape[1] + 1, self.language.L)

        def place(x: np.ndarray) -> np.ndarray:
            out = np.zeros(shape, dtype=x.dtype, order="F")
            out[:, 0] = x[prompts, lead]
            return out

        live = np.broadcast_to(self.language.mask > 0, self.reward.shape)
        book = self._rollouts(place, place(live), prompts, mass)
        book.reward[:, 1:, 0] = totals
        return book

    def singles(self, mass: np.ndarray | None = None) -> Rollouts:
        """Every response as a group of one, [N·S, 1, L], prompts equally likely."""
        N, S = self.mass.shape
        mask = np.broadcast_to(self.language.mask > 0, self.reward.shape)
        mass = self.mass / N if mass is None else mass

        def flat(x: np.ndarray) -> np.ndarray:
            return np.asfortranarray(x.reshape(N * S, 1, -1))

        return self._rollouts(flat, flat(mask), np.repeat(np.arange(N), S), mass.ravel())

    def _rollouts(
        self, take: Callable[[np.ndarray], np.ndarray], mask: np.ndarray, prompts: np.ndarray, mass: np.ndarray
    ) -> Rollouts:
        """The book of what `take` picks. Groups lie next to each other in memory: sums over the short axes G and T
        are then sums of long vectors, three times faster."""
        value = None if self.value is None else take(self.value)
        best = None if self.best is None else self.best[prompts]
        return Rollouts(
            reward=take(self.reward),
            mask=mask,
            logq=take(self.logq),
            logref=take(self.logref),
            value=value,
            next_value=None if value is None else np.asfortranarray(next_values(value)),
            greedy_return=best,
            mass=mass,
            horizon=self.language.horizon,
        )


def quietly(method: Method, **changes: Any) -> Method:
    """A variant of a method under its own name, without the warnings that its maker has already seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApportionWarning)
        return method.replace(**{"name": method.name, "claim": method.claim} | changes)


def prepare(method: Method, group: int | None) -> Method:
    """The method as it is audited: `group` siblings, and spreads over a whole population (no ddof to correct for).

    Raises InvalidMethod for a group too small for its parts, and ApportionError for one too large to enumerate and
    for what the language cannot say.
    """
    s = method.sampler
    if (siblings := s.group if group is None else group) > MOST_SIBLINGS:
        raise ApportionError(f"the group size is {siblings}; the audit takes at most {MOST_SIBLINGS} siblings")
    if s.temperature != 1.0:
        raise ApportionError(
            f"sampler.temperature is {s.temperature}; the audit measures the policy that is sampled: set it to 1"
        )
    if s.start == "visited":
        raise ApportionError("sampler.start is 'visited'; the toy language starts at prompts: set it to 'reset'")
    fixed = s.feedback == "preference" or s.start == "stream" or group is None
    method = quietly(method, sampler=s if fixed else s.replace(group=group))
    if isinstance(method.scale, BatchStd):
        method = quietly(method, scale=method.scale.replace(ddof=0))
    return method


def tabulate(method: Method, language: Language, logits: np.ndarray) -> Tables:
    """The book's columns at a policy; values are exact for the method's own shaped, discounted reward."""
    offline = method.sampler.proposer == "reference"
    sampled = language.reference if offline else logits
    logp = policy.decision_log_probs(language, logits)
    reward = np.zeros(logp.shape)
    if method.sampler.feedback != "none":
        reward[:, np.arange(len(language.length)), language.length - 1] = language.reward
    best = None
    if method.sampler.greedy:
        best = language.reward[np.arange(language.prompts), policy.greedy(language, sampled)]
    tables = Tables(
        language=language,
        logits=logits,
        sampled=sampled,
        mass=policy.mass(language, sampled),
        reward=reward,
        logp=logp,
        logq=policy.decision_log_probs(language, sampled) if offline else logp,
        logref=_logref(method if method.sampler.feedback == "none" else None, language),
        best=best,
    )
    if method.sampler.values == "none":
        return tables
    gamma = method.credit.gamma if isinstance(method.credit, GAE) else 1.0
    ahead = _credit(RewardToGo(gamma), method, tables)
    critic = policy.conditional_mean(language, sampled, ahead)
    value = critic[np.arange(len(critic))[:, None, None], language.prefix] * language.mask
    return dataclasses.replace(tables, value=value)


@cache
def _logref(distilled: Method | None, language: Language) -> np.ndarray:
    """Log-probabilities [N, S, L] under the teacher of a distillation, or under the reference."""
    return policy.decision_log_probs(language, language.reference if distilled is None else anchor(distilled, language))


def _credit(credit: Any, method: Method, tables: Tables) -> np.ndarray:
    """A credit of the method's shaped reward, [N, S, L]."""
    placed = method.kl if isinstance(method.kl, KL) and method.kl.place == "reward" else NoKL()
    probe = Method("probe", credit=credit, kl=placed)
    return np.asarray(advantages(probe, tables.singles()).credit).reshape(tables.reward.shape)


def returns(method: Method, tables: Tables) -> np.ndarray:
    """Shaped return of every response, [N, S]: task reward less the penalty, if that is in the reward."""
    return _credit(Total(), method, tables)[..., 0]


def penalty(method: Method, tables: Tables) -> np.ndarray | None:
    """What a KL in the loss adds to w at each decision, per unit of share: -beta times its slope; None without."""
    if not (isinstance(method.kl, KL) and method.kl.place == "loss"):
        return None
    N, S, L = tables.reward.shape
    alone = quietly(Method("penalty"), kl=method.kl, aggregate=Sum())
    book = dataclasses.replace(tables.singles(np.full((N, S), 1.0)), reward=np.zeros((N * S, 1, L)))
    ledger = advantages(alone, book)
    w = np.asarray(weights(alone, ledger, tables.logp.reshape(N * S, 1, L)).w)
    return w.reshape(N, S, L) * (N * S)


def without_loss_kl(method: Method) -> Method:
    """The method without a penalty in the loss."""
    return quietly(method, kl=NoKL()) if isinstance(method.kl, KL) and method.kl.place == "loss" else method
