"""Training on the toy language: one loop for every method of the catalogue, measured exactly at every step.

The loop reads only what a method declares: its sampler says who proposes, how many siblings, what is kept and how
often a collection is used; `core.weigh` makes the weights; its update rule takes the step. Axes as in `language`
(`N` prompts, `K` prefixes, `V` tokens) and as in `Rollouts` (`M` groups drawn, `G` siblings, `T` decisions = L).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError
from apportion.core.method import Method
from apportion.core.parts import KL, KeepAll, PairLogistic
from apportion.core.rollouts import Rollouts
from apportion.core.update import Adam, NaturalGradient, ValueLoss
from apportion.core.weigh import Ledger, advantages, weights
from apportion.toy import policy
from apportion.toy.adam import AdamState, adam_ascend, adam_start, cosine
from apportion.toy.language import Language

BETA = 0.5  # of the optimum pi* that every run is measured against, in reward per nat
Measures = dict[str, float]
Callback = Callable[[int, int, Measures], None]


def preset(
    method: Method,
    learning_rate: float = 0.05,
    beta: float = BETA,
    anneal: Any = "cosine",
    final_fraction: float = 0.02,
) -> Method:
    """The method with step size and penalty for a table of logits; the catalogue's are for networks.

    learning_rate, anneal and final_fraction go to Adam (a natural gradient keeps its own region); `beta` to
    the KL penalty and to DPO's, where the method has one. A distillation keeps its own: its target is the teacher.
    """
    if isinstance(method.update, Adam):
        step = method.update.replace(learning_rate=learning_rate, anneal=anneal, final_fraction=final_fraction)
        method = method.replace(update=step)
    if isinstance(method.trust, PairLogistic):
        method = method.replace(name=method.name, claim=method.claim, trust=method.trust.replace(beta=beta))
    if isinstance(method.kl, KL) and method.sampler.feedback != "none":
        method = method.replace(name=method.name, claim=method.claim, kl=method.kl.replace(beta=beta))
    return method


@dataclass(frozen=True, eq=False)
class State:
    """All that a run needs to go on as if it had never stopped."""

    logits: np.ndarray
    """float [N, K, V]"""
    adam: AdamState
    critic: np.ndarray
    """float [N, K]: the table of values; only critic methods read it."""
    beta: float
    """The KL coefficient now (a controller may move it)."""
    rng: Mapping[str, Any]
    """State of the random generator."""
    step: int = 0
    short: int = 0
    """Steps at which the filter's refills ran out before the batch was full."""
    rows: tuple[Measures, ...] = ()


@dataclass(frozen=True, eq=False)
class History:
    """What a run measured, exactly, over its steps; and the state it ended in."""

    rows: tuple[Measures, ...]
    """Each with step, kl_to_optimum, kl_to_reference (nats), expected_reward, length_correct, length_wrong
    (decisions; nan where there is none), all means over prompts."""
    state: State
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> Measures:
        """The last row."""
        return self.rows[-1]

    def __getitem__(self, name: str) -> np.ndarray:
        """One measure over the run, float [rows]."""
        return np.array([row[name] for row in self.rows])


@dataclass(frozen=True, eq=False)
class Draw:
    """One collection: which responses were drawn for which prompt, and the book of them."""

    rows: np.ndarray
    """int [M, G]: responses."""
    prompts: np.ndarray
    """int [M]"""
    rollouts: Rollouts


@dataclass(frozen=True, eq=False)
class _Run:
    method: Method
    language: Language
    repeat: int
    steps: int
    optimum: policy.Tilted
    anchor: np.ndarray
    pool: Draw | None
    batch: int


def measure(language: Language, logits: np.ndarray, optimum: policy.Tilted) -> Measures:
    """Exact measures of a policy, means over prompts."""
    log_p = policy.sequence_log_probs(language, logits)
    with np.errstate(invalid="ignore", divide="ignore"):
        length = policy.mean_length(language, logits)
    return {
        "kl_to_optimum": float(policy.kl(log_p, optimum.log_probs).mean()),
        "kl_to_reference": float(policy.kl(log_p, policy.sequence_log_probs(language, language.reference)).mean()),
        "expected_reward": float((np.exp(log_p) * language.reward).sum(axis=-1).mean()),
        "length_correct": float(length.correct.mean()),
        "length_wrong": float(length.wrong.mean()),
    }


# --- the book --------------------------------------------------------------------------------------------


def anchor(method: Method, language: Language) -> np.ndarray:
    """Logits [N, K, V] that `logref` comes from: the teacher pi* where the task's reward is not read, else pi_ref."""
    return policy.tilted(language, BETA).logits if method.sampler.feedback == "none" else language.reference


def next_values(value: np.ndarray) -> np.ndarray:
    """Value of the state after each decision [..., T], from that before it; 0 after the last."""
    return np.concatenate([value[..., 1:], np.zeros_like(value[..., :1])], axis=-1)


def book(
    method: Method,
    language: Language,
    sampler: np.ndarray,
    rows: np.ndarray,
    prompts: np.ndarray,
    *,
    logref: np.ndarray,
    reward: np.ndarray | None = None,
    value: np.ndarray | None = None,
    mass: np.ndarray | None = None,
) -> Rollouts:
    """Rollouts of responses `rows [M, G]` to `prompts [M]`, drawn from the logits `sampler`.

    reward: [M, G] return of each response, paid on its last decision; None takes the task's (0 where the
    sampler does not read it). value: [M, G, T]. mass: [M]. logref: [N, K, V] logits of the reference (see `anchor`).
    """
    who = prompts[:, None]
    if reward is None:
        read = method.sampler.feedback != "none"
        reward = language.reward[who, rows] if read else np.zeros(rows.shape)
    paid = np.zeros((*rows.shape, language.L))
    np.put_along_axis(paid, language.length[rows][..., None] - 1, reward[..., None], axis=-1)
    greedy = None
    if method.sampler.greedy:
        greedy = language.reward[prompts, policy.greedy(language, sampler)[prompts]]
    return Rollouts(
        reward=paid,
        mask=language.mask[rows] > 0,
        logq=policy.decision_log_probs(language, sampler, rows, who),
        logref=policy.decision_log_probs(language, logref, rows, who),
        value=value,
        next_value=None if value is None else next_values(value),
        greedy_return=greedy,
        mass=mass,
        horizon=language.horizon,
    )


def preferences(language: Language, rows: np.ndarray, prompts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bradley-Terry labels [M, 2]: the first of a pair is chosen (1) with probability sigmoid(r_1 - r_2)."""
    r = language.reward[prompts[:, None], rows]
    first = rng.random(len(rows)) < 1 / (1 + np.exp(r[:, 1] - r[:, 0]))
    return np.stack([first, ~first], axis=1).astype(float)


def _value(run: _Run, state: State, rows: np.ndarray, prompts: np.ndarray, rng: np.random.Generator):
    """Values [M, G, T] at the states visited, where the method reads any."""
    kind = run.method.sampler.values
    if kind == "none":
        return None
    mask, at = run.language.mask[rows], (prompts[:, None, None], run.language.prefix[rows])
    if kind == "critic":
        return state.critic[at] * mask
    # With 0/1 rewards a fresh rollout succeeds with exactly the state's value, so the count is binomial.
    exact = np.clip(policy.values(run.language, state.logits).state[at], 0.0, 1.0)
    K = run.method.sampler.value_rollouts
    return rng.binomial(K, exact) / K * mask


def _draw(run: _Run, state: State, rng: np.random.Generator) -> Draw:
    """One batch from the sampler: `repeat` groups of every prompt."""
    s, language = run.method.sampler, run.language
    logits = (language.reference if s.proposer == "reference" else state.logits) / s.temperature
    prompts = np.repeat(np.arange(language.prompts), run.repeat)
    rows = policy.sample(language, logits, rng, s.group, prompts)
    reward = preferences(language, rows, prompts, rng) if s.feedback == "preference" else None
    value = _value(run, state, rows, prompts, rng)
    rollouts = book(run.method, language, logits, rows, prompts, logref=run.anchor, reward=reward, value=value)
    return Draw(rows, prompts, rollouts)


def _map(draws: list[Draw], change: Callable[[list[np.ndarray]], np.ndarray]) -> Draw:
    """One collection from some others, every array changed alike (all have the same fields)."""
    fields: dict[str, Any] = {}
    for name in (f.name for f in dataclasses.fields(Rollouts)):
        values = [getattr(d.rollouts, name) for d in draws]
        fields[name] = change(values) if isinstance(values[0], np.ndarray) else values[0]
    return Draw(change([d.rows for d in draws]), change([d.prompts for d in draws]), Rollouts(**fields))


def _take(draw: Draw, index: np.ndarray) -> Draw:
    """Some groups of a collection."""
    return _map([draw], lambda x: x[0][index])


def _collect(run: _Run, state: State, rng: np.random.Generator) -> tuple[Draw, bool]:
    """A collection, and whether the filter left it short of a full batch."""
    if run.pool is not None:
        size = len(run.pool.rows)
        return _take(run.pool, rng.choice(size, min(run.batch, size), replace=False)), False
    batches = getattr(run.method.sampler.keep, "max_batches", None)
    if batches is None:
        return _draw(run, state, rng), False
    full, kept, found = run.repeat * run.language.prompts, [], 0
    for _ in range(batches):
        draw = _draw(run, state, rng)
        stays = np.flatnonzero(run.method.sampler.keep(draw.rollouts).any(axis=1))
        kept.append(_take(draw, stays[: full - found]))
        found += len(kept[-1].rows)
        if found == full:
            break
    return _map(kept, np.concatenate), found < full


def _pool(run: _Run, state: State, size: int, seed: int) -> tuple[Method, Draw]:
    """A data set drawn once, `size` groups a prompt, after the filter; and the method that finds it filtered.

    A filter's weight is the chance to stay. The stream is its own, so that a resumed run finds the same data.
    """
    rng = np.random.default_rng([seed, 1])
    draw = _draw(dataclasses.replace(run, repeat=size), state, rng)
    kept = run.method.sampler.keep(draw.rollouts)
    stays = (rng.random(kept.shape) < kept).all(axis=1)
    fixed = run.method.replace(name=run.method.name, sampler=run.method.sampler.replace(keep=KeepAll()))
    return fixed, _take(draw, np.flatnonzero(stays))


# --- the step --------------------------------------------------------------------------------------------


def _rate(update: Adam, done: int, total: int) -> float:
    """Step size of the update number `done` (counted from 1) of `total`."""
    if update.anneal == "constant":
        return update.learning_rate
    if update.anneal == "linear":
        return update.learning_rate * (1 - (1 - update.final_fraction) * done / total)
    return update.learning_rate * cosine(done, total, update.final_fraction)


def _ascend(update: Adam, logits: np.ndarray, g: np.ndarray, adam: AdamState, total: int):
    if update.max_grad_norm is not None:
        g = g * min(1.0, update.max_grad_norm / max(float(np.sqrt((g * g).sum())), 1e-300))
    rate = _rate(update, adam.step + 1, total)
    return adam_ascend(logits, g, adam, rate, decay=(update.b1, update.b2), epsilon=update.eps)


def _visits(language: Language, rows: np.ndarray, prompts: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sum of `x` (shape of rows + T) at each prefix visited, [N, K]."""
    N, K = language.prompts, language.prefixes
    at = prompts[:, None, None] * K + language.prefix[rows]
    return np.bincount(at.ravel(), weights=(x * language.mask[rows]).ravel(), minlength=N * K).reshape(N, K)


def natural_step(
    rule: NaturalGradient, logits: np.ndarray, g: np.ndarray, visits: np.ndarray, gain: Callable[[np.ndarray], float]
) -> np.ndarray:
    """TRPO's step on a table: the damped Fisher solved in closed form, then backtracked into the region.

    visits: [N, K] share of the collection's decisions at each prefix. gain: surrogate improvement of new logits.
    A prefix's Fisher block is d (diag p - p p'), so (Sherman-Morrison) its damped inverse needs no iterations.
    """
    log_p = policy.log_softmax(logits)
    p, d = np.exp(log_p), visits[..., None]
    inverse = 1.0 / (d * p + rule.damping)
    x, u = inverse * g, inverse * p
    x += d * u * (p * x).sum(-1, keepdims=True) / (1.0 - d * (p * u).sum(-1, keepdims=True))
    curvature = float((g * x).sum())
    if curvature <= 0:
        return logits
    step = np.sqrt(2 * rule.delta / curvature) * x
    for _ in range(rule.backtracks + 1):
        moved = logits + step
        away = (visits * (p * (log_p - policy.log_softmax(moved))).sum(-1)).sum()
        if away <= rule.delta and gain(moved) > 0:
            return moved
        step = step * rule.shrink
    return logits


def _regress(loss: ValueLoss, language: Language, critic: np.ndarray, cut: _Cut) -> np.ndarray:
    """The table moves by `coefficient` of the way to the mean return at each visited prefix.

    A table needs no step size of its own: `learning_rate` is for networks.
    """
    old, mask = cut.value, language.mask[cut.rows]
    now = critic[cut.prompts[:, None, None], language.prefix[cut.rows]]
    error = cut.ledger.credit - now
    if loss.clip is not None:  # the larger of the two losses counts, and the clipped one does not move
        clipped = old + np.clip(now - old, -loss.clip, loss.clip)
        error = np.where((clipped - cut.ledger.credit) ** 2 > error**2, 0.0, error)
    count = _visits(language, cut.rows, cut.prompts, np.ones_like(mask))
    total = _visits(language, cut.rows, cut.prompts, error)
    return critic + loss.coefficient * total / np.maximum(count, 1.0)


@dataclass(frozen=True, eq=False)
class _Cut:
    """Some rows of a collection: what one update sees."""

    rows: np.ndarray
    prompts: np.ndarray
    ledger: Ledger
    value: np.ndarray


def _cuts(method: Method, draw: Draw, ledger: Ledger, rng: np.random.Generator) -> list[_Cut]:
    """The minibatches of one pass: single trajectories dealt out, or whole groups where the loss needs them."""
    old = draw.rollouts.value if draw.rollouts.value is not None else np.zeros_like(draw.rollouts.reward)
    whole = _Cut(draw.rows, draw.prompts, ledger, old)
    rows, prompts = draw.rows, draw.prompts
    count = method.sampler.minibatches
    if count == 1:
        return [whole]
    if method.trust.scope != "group":
        flat = (-1, 1, old.shape[-1])
        prompts, rows = np.repeat(prompts, rows.shape[1]), rows.reshape(-1, 1)
        ledger, old = ledger.map(lambda x: x.reshape(flat)), old.reshape(flat)
    parts = np.array_split(rng.permutation(len(rows)), min(count, max(len(rows), 1)))
    return [_Cut(rows[i], prompts[i], ledger.map(lambda x, i=i: x[i]), old[i]) for i in parts]  # type: ignore[misc]


def _gradient(run: _Run, logits: np.ndarray, cut: _Cut, beta: float, scale: float) -> np.ndarray:
    """The update of one cut, [N, K, V], times `scale`; with the entropy bonus, if any."""
    tau, who = run.method.sampler.temperature, cut.prompts[:, None]
    logp = policy.decision_log_probs(run.language, logits / tau, cut.rows, who)
    w = np.asarray(weights(run.method, cut.ledger, logp, beta).w)
    g = policy.score_sum(run.language, logits / tau, w, cut.rows, who) / tau
    if run.method.entropy:
        log_p = policy.log_softmax(logits)
        p = np.exp(log_p)
        slope = -p * (log_p - (p * log_p).sum(-1, keepdims=True))
        g = g + run.method.entropy * _visits(run.language, cut.rows, cut.prompts, cut.ledger.share)[..., None] * slope
    return g * scale


def _update(run: _Run, state: State, draw: Draw, rng: np.random.Generator) -> State:
    """All passes over one collection; none over an empty one."""
    method, language = run.method, run.language
    if not draw.rows.size:
        return state
    ledger = advantages(method, draw.rollouts, state.beta)
    logits, adam, critic = state.logits, state.adam, state.critic
    total = run.steps * method.sampler.epochs * method.sampler.minibatches
    for _ in range(method.sampler.epochs):
        cuts = _cuts(method, draw, ledger, rng)
        for cut in cuts:
            g = _gradient(run, logits, cut, state.beta, len(cuts))
            if isinstance(method.update, Adam):
                logits, adam = _ascend(method.update, logits, g, adam, total)
            else:
                logits = _natural(run, method.update, logits, g, cut)
            if method.value_loss is not None:
                critic = _regress(method.value_loss, language, critic, cut)
    beta = state.beta
    if isinstance(method.kl, KL) and method.kl.adaptive is not None:
        drift = float((draw.rollouts.logq - draw.rollouts.logref)[draw.rollouts.mask].sum())
        beta = method.kl.adaptive(beta, drift / draw.rows.size, draw.rows.size)
    return dataclasses.replace(state, logits=logits, adam=adam, critic=critic, beta=beta)


def _natural(run: _Run, rule: NaturalGradient, logits: np.ndarray, g: np.ndarray, cut: _Cut) -> np.ndarray:
    share = cut.ledger.share / max(cut.ledger.share.sum(), 1e-300)

    def gain(moved: np.ndarray) -> float:
        logp = policy.decision_log_probs(run.language, moved, cut.rows, cut.prompts[:, None])
        ratio = run.method.ratio(logp, cut.ledger.logq, cut.ledger.mask)
        return float((cut.ledger.share * cut.ledger.advantage * (ratio - 1)).sum())

    return natural_step(rule, logits, g, _visits(run.language, cut.rows, cut.prompts, share), gain)


# --- the loop --------------------------------------------------------------------------------------------


def _shape(method: Method, group: int | None) -> tuple[Method, int]:
    """The method with `group` responses a prompt as siblings; or, where it takes them singly or in pairs, how many."""
    own = method.sampler.group
    if group is None:
        return method, 1
    if own == 1 or isinstance(method.trust, PairLogistic):
        return method, max(group // own, 1)
    return method.replace(name=method.name, sampler=method.sampler.replace(group=group)), 1


def begin(method: Method, language: Language, seed: int) -> State:
    """The state before the first step: the reference policy, and a critic at each prompt's success rate there."""
    success = policy.expected_reward(language, language.reference)
    critic = np.broadcast_to(success[:, None], (language.prompts, language.prefixes)).copy()
    logits = np.array(language.reference)
    return State(
        logits, adam_start(logits), critic, float(method.kl.beta), np.random.default_rng(seed).bit_generator.state
    )


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
    every: steps between measurements (None: a hundred over the run); the first and the last are always measured.
    resume, until: go on from a `State`, stop after that many steps in all: bitwise as if never stopped, given the
        same other arguments.
    callback: called with (step, steps, measures) at each measurement.

    Raises ApportionError for fewer than one step, and for a pool whose sampler proposes from the policy.
    """
    if steps < 1:
        raise ApportionError(f"steps is {steps}; it must be 1 or more")
    if pool is not None and method.sampler.proposer != "reference":
        raise ApportionError(
            f"pool is {pool}, but {method.name} samples from the policy; set sampler.proposer='reference'"
        )
    method, repeat = _shape(method, group)
    method.check_horizon(language.horizon)
    run = _Run(method, language, repeat, steps, policy.tilted(language, BETA), anchor(method, language), None, batch)
    state = begin(method, language, seed) if resume is None else resume
    if pool is not None:
        fixed, data = _pool(run, state, pool, seed)
        run = dataclasses.replace(run, method=fixed, pool=data)
    every = max(steps // 100, 1) if every is None else every
    rng = np.random.default_rng()
    rng.bit_generator.state = state.rng
    state = _note(run, state, every, callback)
    while state.step < (steps if until is None else min(until, steps)):
        draw, short = _collect(run, state, rng)
        state = dataclasses.replace(_update(run, state, draw, rng), step=state.step + 1, short=state.short + short)
        state = _note(run, state, every, callback)
    state = dataclasses.replace(state, rng=rng.bit_generator.state)
    return History(state.rows, state, _notes(run, state))


def _note(run: _Run, state: State, every: int, callback: Callback | None) -> State:
    """The state with a new row of measures, where one is due."""
    due = state.step % every == 0 or state.step == run.steps
    if not due or (state.rows and state.rows[-1]["step"] == state.step):
        return state
    row = {"step": float(state.step)} | measure(run.language, state.logits, run.optimum)
    if callback is not None:
        callback(state.step, run.steps, row)
    return dataclasses.replace(state, rows=(*state.rows, row))


def _notes(run: _Run, state: State) -> tuple[str, ...]:
    if not state.short:
        return ()
    tries = getattr(run.method.sampler.keep, "max_batches", 1)
    return (
        f"{run.method.name}: in {state.short} of {state.step} steps, {tries} batches did not fill one with groups "
        "that carry signal; it went on with what there was",
    )
