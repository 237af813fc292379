"""Training on the toy language: one loop for every method of the catalogue, measured exactly at every step.

The loop reads only what a method declares: its sampler says who proposes, how many siblings, what is kept and how
often a collection is used; `core.weigh` makes the weights; its update rule takes the step. Axes as in `language`
(`N` prompts, `K` prefixes, `V` tokens) and as in `Rollouts` (`M` groups drawn, `G` siblings, `T` decisions = L).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.core.parts import KL, PairLogistic
from apportion.core.update import Adam, NaturalGradient, ValueLoss
from apportion.core.weigh import Ledger, advantages, weights
from apportion.toy import policy
from apportion.toy.adam import AdamState, adam_ascend, adam_start, cosine
from apportion.toy.collect import BETA, Array, Draw, Measures, Run, State, anchor, collect, rollouts_of, take, with_pool
from apportion.toy.language import Language

Callback = Callable[[int, int, Measures], None]


def preset(method: Method, learning_rate: float = 0.05, beta: float = BETA, anneal: Any = "cosine") -> Method:
    """The method with step size and penalty for a table of logits; the catalogue's are for networks.

    learning_rate and anneal, down to 2%, go to Adam (a natural gradient keeps its own region); `beta` to the KL
    penalty and to DPO's, where the method has one. A distillation keeps its own: its target is the teacher.
    """
    changes: dict[str, Any] = {"name": method.name, "claim": method.claim}
    if isinstance(method.update, Adam):
        changes["update"] = method.update.replace(learning_rate=learning_rate, anneal=anneal, final_fraction=0.02)
    if isinstance(method.trust, PairLogistic):
        changes["trust"] = method.trust.replace(beta=beta)
    if isinstance(method.kl, KL) and method.sampler.feedback != "none":
        changes["kl"] = method.kl.replace(beta=beta)
    return method.replace(**changes)


@dataclass(frozen=True, eq=False)
class History:
    """What a run measured, exactly, over its steps; and the state it ended in. A row holds `step` and `measure`."""

    rows: tuple[Measures, ...]
    state: State
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> Measures:
        """The last row."""
        return self.rows[-1]

    def __getitem__(self, name: str) -> Array:
        """One measure over the run, float [rows]."""
        return np.array([row[name] for row in self.rows])


def measure(language: Language, logits: Array, optimum: policy.Tilted) -> Measures:
    """Exact means over prompts: KLs in nats, lengths in decisions (nan where no response is correct, or none wrong)."""
    log_p = policy.sequence_log_probs(language, logits)
    correct, wrong = policy.mean_length(language, logits)
    found = {
        "kl_to_optimum": policy.kl(log_p, optimum.log_probs),
        "kl_to_reference": policy.kl(log_p, policy.sequence_log_probs(language, language.reference)),
        "expected_reward": (np.exp(log_p) * language.reward).sum(axis=-1),
    }
    return {k: float(x.mean()) for k, x in (found | {"length_correct": correct, "length_wrong": wrong}).items()}


def _ascend(update: Adam, logits: Array, g: Array, adam: AdamState, total: int):
    """One step of `total`, clipped and annealed as the update rule says."""
    if update.max_grad_norm is not None:
        g = g * min(1.0, update.max_grad_norm / max(float(np.sqrt((g * g).sum())), 1e-300))
    done, final = (adam.step + 1) / total, update.final_fraction
    path = {"constant": 1.0, "linear": 1 - (1 - final) * done, "cosine": cosine(adam.step + 1, total, final)}
    rate = update.learning_rate * path[update.anneal]
    return adam_ascend(logits, g, adam, rate, decay=(update.b1, update.b2), epsilon=update.eps)


def _visits(language: Language, at: Draw, x: Array) -> Array:
    """Sum of `x` (shape of rows + T) at each prefix visited, [N, K]."""
    N, K, rows = language.prompts, language.prefixes, at["rows"]
    where = at["prompts"][:, None, None] * K + language.prefix[rows]
    return np.bincount(where.ravel(), weights=(x * language.mask[rows]).ravel(), minlength=N * K).reshape(N, K)


def natural_step(
    rule: NaturalGradient, logits: Array, g: Array, visits: Array, gain: Callable[[Array], float]
) -> Array:
    """TRPO's step on a table: the damped Fisher solved in closed form, then backtracked into the region.

    visits: [N, K] share of the collection's decisions at each prefix. gain: surrogate improvement of new logits.
    A prefix's Fisher block is d (diag p - p p'), so (Sherman-Morrison) its damped inverse needs no iterations.
    """
    log_p, d = policy.log_softmax(logits), visits[..., None]
    p = np.exp(log_p)
    inverse = 1.0 / (d * p + rule.damping)
    x, u = inverse * g, inverse * p
    x += d * u * (p * x).sum(-1, keepdims=True) / (1.0 - d * (p * u).sum(-1, keepdims=True))
    step = np.sqrt(2 * rule.delta / max(float((g * x).sum()), 1e-300)) * x
    for k in range(rule.backtracks + 1):
        moved = logits + step * rule.shrink**k
        away = (visits * (p * (log_p - policy.log_softmax(moved))).sum(-1)).sum()
        if away <= rule.delta and gain(moved) > 0:
            return moved
    return logits


def _regress(loss: ValueLoss, language: Language, critic: Array, at: Draw, target: Array) -> Array:
    """The table moves by `coefficient` of the way to the mean return `target` at each visited prefix.

    A table needs no step size of its own: `learning_rate` is for networks.
    """
    now = critic[at["prompts"][:, None, None], language.prefix[at["rows"]]]
    error = target - now
    if loss.clip is not None:  # the larger of the two losses counts, and the clipped one does not move
        clipped = at["value"] + np.clip(now - at["value"], -loss.clip, loss.clip)
        error = np.where((clipped - target) ** 2 > error**2, 0.0, error)
    count = _visits(language, at, np.ones_like(error))
    return critic + loss.coefficient * _visits(language, at, error) / np.maximum(count, 1.0)


def _cuts(method: Method, draw: Draw, ledger: Ledger, rng: np.random.Generator) -> list[tuple[Draw, Ledger]]:
    """The minibatches of one pass: single trajectories dealt out, or whole groups where the loss needs them."""
    at, count = {k: x for k, x in draw.items() if k in ("rows", "prompts", "value")}, method.sampler.minibatches
    if count == 1:
        return [(at, ledger)]
    if method.trust.scope != "group":
        at["prompts"] = np.repeat(at["prompts"], at["rows"].shape[1])
        at = {k: x if k == "prompts" else x.reshape(-1, 1, *x.shape[2:]) for k, x in at.items()}
        ledger = ledger.map(lambda x: x.reshape(-1, 1, x.shape[-1]))
    rows = rng.permutation(len(at["rows"]))
    parts = np.array_split(rows, min(count, len(rows)))
    return [(take(at, i), ledger.map(lambda x, i=i: x[i])) for i in parts]  # type: ignore[misc]


def _gradient(run: Run, logits: Array, at: Draw, ledger: Ledger, beta: float) -> Array:
    """The update of one cut, [N, K, V]; with the entropy bonus, if any."""
    language, tau, who = run.language, run.method.sampler.temperature, at["prompts"][:, None]
    logp = policy.decision_log_probs(language, logits / tau, at["rows"], who)
    w = np.asarray(weights(run.method, ledger, logp, beta).w)
    g = policy.score_sum(language, logits / tau, w, at["rows"], who) / tau
    if run.method.entropy:
        log_p = policy.log_softmax(logits)
        p = np.exp(log_p)
        slope = -p * (log_p - (p * log_p).sum(-1, keepdims=True))
        g = g + run.method.entropy * _visits(language, at, ledger.share)[..., None] * slope
    return g


def _update(run: Run, state: State, draw: Draw, rng: np.random.Generator) -> State:
    """All passes over one collection; none over an empty one. A cut's update is scaled up to the whole."""
    method, rows = run.method, draw["rows"]
    if not rows.size:
        return state
    ledger = advantages(method, rollouts_of(run, draw), state.beta)
    logits, adam, critic, beta = state.logits, state.adam, state.critic, state.beta
    total = run.steps * method.sampler.epochs * method.sampler.minibatches
    for _ in range(method.sampler.epochs):
        cuts = _cuts(method, draw, ledger, rng)
        for at, part in cuts:
            g = _gradient(run, logits, at, part, state.beta) * len(cuts)
            if isinstance(method.update, Adam):
                logits, adam = _ascend(method.update, logits, g, adam, total)
            else:
                visits = _visits(run.language, at, part.share / part.share.sum())
                logits = natural_step(method.update, logits, g, visits, partial(_gain, run, at, part))
            if method.value_loss is not None:
                critic = _regress(method.value_loss, run.language, critic, at, part.credit)
    if isinstance(method.kl, KL) and method.kl.adaptive is not None:
        drift = float((draw["logq"] - draw["logref"])[draw["mask"]].sum())
        beta = method.kl.adaptive(beta, drift / rows.size, rows.size)
    return dataclasses.replace(state, logits=logits, adam=adam, critic=critic, beta=beta)


def _gain(run: Run, at: Draw, ledger: Ledger, moved: Array) -> float:
    """Surrogate improvement of new logits on a cut."""
    logp = policy.decision_log_probs(run.language, moved, at["rows"], at["prompts"][:, None])
    ratio = run.method.ratio(logp, ledger.logq, ledger.mask)
    return float((ledger.share * ledger.advantage * (ratio - 1)).sum())


def _shape(method: Method, group: int | None) -> tuple[Method, int]:
    """The method with `group` responses a prompt as siblings; or, where it takes them singly or in pairs, how many."""
    own = method.sampler.group
    if group is None or own == 1 or isinstance(method.trust, PairLogistic):
        return method, max((group or own) // own, 1)
    return method.replace(name=method.name, sampler=method.sampler.replace(group=group)), 1


def begin(method: Method, language: Language, seed: int) -> State:
    """The state before the first step: the reference policy, and a critic at each prompt's success rate there."""
    critic = np.repeat(policy.expected_reward(language, language.reference)[:, None], language.prefixes, axis=1)
    logits, rng = np.array(language.reference), np.random.default_rng(seed)
    return State(logits, adam_start(logits), critic, float(method.kl.beta), rng.bit_generator.state)


def train(
    method: Method,
    language: Language,
    steps: int,
    seed: int = 0,
    *,
    group: int | None = 8,
    pool: int | None = None,
    batch: int = 512,
    every: int | None = None,
    resume: State | None = None,
    until: int | None = None,
    callback: Callback | None = None,
) -> History:
    """Train `method` from the reference policy; every prompt at every step. Step sizes and beta are the method's.

    group: responses drawn for each prompt and step: siblings where the method compares them, else separate rows;
        None takes the method's own group.
    pool: with a sampler that proposes from the reference, groups a prompt drawn once, as a data set of which each
        step takes `batch` groups without replacement; None draws afresh at each step.
    every: steps between measurements (None: a hundred over the run), of which `callback(step, steps, row)` is told.
    resume, until: go on from a `State`, stop after that many steps in all: bitwise as if never stopped.

    Raises ApportionError for fewer than one step, and for a pool whose sampler proposes from the policy.
    """
    if steps < 1:
        raise ApportionError(f"steps is {steps}; it must be 1 or more")
    if pool is not None and method.sampler.proposer != "reference":
        raise ApportionError(f"pool={pool} but {method.name} samples from the policy; set sampler.proposer='reference'")
    method, repeat = _shape(method, group)
    method.check_horizon(language.horizon)
    run = Run(method, language, repeat, steps, policy.tilted(language, BETA), anchor(method, language), None, batch)
    state = begin(method, language, seed) if resume is None else resume
    if pool is not None:
        run = with_pool(run, state, pool, seed)
    every = max(steps // 100, 1) if every is None else every
    rng = np.random.default_rng()
    rng.bit_generator.state = state.rng
    state = _note(run, state, every, callback)
    while state.step < (steps if until is None else min(until, steps)):
        draw, short = collect(run, state, rng)
        state = dataclasses.replace(_update(run, state, draw, rng), step=state.step + 1, short=state.short + short)
        state = _note(run, state, every, callback)
    state = dataclasses.replace(state, rng=rng.bit_generator.state)
    tries = getattr(method.sampler.keep, "max_batches", 1)
    dry = f"{tries} batches did not fill one with groups that carry signal; it went on with what there was"
    notes = (f"{method.name}: in {state.short} of {state.step} steps, {dry}",) if state.short else ()
    return History(state.rows, state, notes)


def _note(run: Run, state: State, every: int, callback: Callback | None) -> State:
    """The state with a new row of measures, where one is due."""
    if (state.step % every and state.step != run.steps) or (state.rows and state.rows[-1]["step"] == state.step):
        return state
    row = {"step": float(state.step)} | measure(run.language, state.logits, run.optimum)
    if callback is not None:
        callback(state.step, run.steps, row)
    return dataclasses.replace(state, rows=(*state.rows, row))
