"""From rollouts to weights: `advantages` once a collection, `weights` once a minibatch. Nothing else makes w."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from apportion.core.arrays import Array, array_namespace, as_float, check_finite, is_lazy_array
from apportion.core.errors import InvalidData
from apportion.core.method import Method
from apportion.core.parts import GAE, KL, PairLogistic
from apportion.core.parts.kl import estimate
from apportion.core.rollouts import Rollouts


@dataclass(frozen=True, eq=False)
class Ledger:
    """The reward's account book; every row is [N G T] (or a cut of it) and multiplies or adds into w.

    reward: as the task gave it. kl: the penalty taken from it (units of reward). credit, baseline, scale: the
    advantage is (credit - baseline) / scale. share: the denominator. ratio, gate, w: filled by `weights`.
    mask, logq, logref: carried along, because the ratio and the KL need them again.
    """

    reward: Array
    kl: Array
    credit: Array
    baseline: Array
    scale: Array
    share: Array
    mask: Array
    logq: Array
    logref: Array | None = None
    ratio: Array | None = None
    gate: Array | None = None
    w: Array | None = None

    @property
    def advantage(self) -> Array:
        """(credit - baseline) / scale, [N G T]."""
        return (self.credit - self.baseline) / self.scale

    def map(self, cut: Callable[[Array], Array]) -> Ledger:
        """The same ledger with `cut` applied to every row: a slice, a reshape, a gather."""
        rows = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Ledger(**{name: None if x is None else cut(x) for name, x in rows.items()})


def advantages(method: Method, rollouts: Rollouts, beta: float | Array | None = None) -> Ledger:
    """Credit, baseline, scale and share of a whole collection. Pure; runs under `jax.jit`.

    beta: the current KL coefficient, when a controller moves it; None takes the method's.

    Raises InvalidData for a field that the method reads and the rollouts lack, and for a non-finite number where it
    would count (of JAX arrays, whose numbers are not there to read under jit, `Rollouts.check` asks outside of it).

    >>> import numpy as np
    >>> from apportion.core.catalogue import dr_grpo, grpo
    >>> r = np.array([[[1.0], [0.0], [0.0], [0.0]]])
    >>> rollouts = Rollouts(reward=r, mask=r == r, logq=0 * r, logref=0 * r, horizon=1)
    >>> advantages(dr_grpo, rollouts).advantage.ravel()
    array([ 0.75, -0.25, -0.25, -0.25])
    """
    xp = array_namespace(rollouts.reward)
    for name in sorted(needs(method)):
        if getattr(rollouts, name) is None:
            raise InvalidData(f"{method.name} reads {name}, which the rollouts lack; give Rollouts({name}=...)")
    if not is_lazy_array(rollouts.reward):
        rollouts.check()
    given, rollouts = rollouts.reward, rollouts.settled()
    kl = xp.zeros_like(given)
    if isinstance(method.kl, KL) and method.kl.place == "reward":
        penalty = estimate(method.kl.estimator, rollouts.logq, rollouts.logref)
        kl = (method.kl.beta if beta is None else beta) * penalty
    shaped = rollouts.reward - kl if method.sampler.feedback != "none" else -kl
    credit = method.credit(rollouts, shaped)
    baseline = method.baseline(rollouts, shaped, credit)
    shift, scale = method.scale(rollouts, shaped, credit - baseline)
    # A sibling whose reward function failed says nothing: its advantage is 0.
    baseline = xp.where(rollouts.count[..., None], baseline + shift, credit)
    share = method.aggregate(rollouts, method.sampler.keep(rollouts))
    return Ledger(
        reward=given,
        kl=kl,
        credit=credit,
        baseline=baseline,
        scale=scale,
        share=share,
        mask=rollouts.mask,
        logq=rollouts.logq,
        logref=rollouts.logref,
    )


def weights(method: Method, ledger: Ledger, logp: Array, beta: float | Array | None = None) -> Ledger:
    """The ledger with ratio, gate and w, such that the update is sum(w · grad log pi).

    logp: log-probability [N G T] under the policy now; its gradient is not taken here. Rows may be any cut of the
    collection that keeps trajectories whole where the ratio needs them whole, pairs whole for DPO; methods with
    per-decision parts take any shape. Raises InvalidData where it is not finite (JAX arrays are not looked at).
    """
    xp = array_namespace(logp)
    if not is_lazy_array(logp):
        check_finite("logp", logp, ledger.mask, "mask out what the policy did not decide")
    logp = xp.where(ledger.mask, logp, ledger.logq)
    advantage = ledger.advantage
    ratio = method.ratio(logp, ledger.logq, ledger.mask)
    gate = method.trust.gate(ratio, advantage, logp, ledger.logref, ledger.mask)
    w = method.ratio.pool(ledger.share * advantage * gate, ratio, ledger.mask)
    if isinstance(method.kl, KL) and method.kl.place == "loss":
        assert ledger.logref is not None
        slope = method.kl.slope(logp, ledger.logq, xp.where(ledger.mask, ledger.logref, logp))
        w = w - ledger.share * (method.kl.beta if beta is None else beta) * slope
    return dataclasses.replace(ledger, ratio=ratio, gate=gate, w=w * as_float(ledger.mask, w))


def needs(method: Method) -> frozenset[str]:
    """The optional rollout fields that a method reads: "logref", "value", "next_value", "greedy_return"."""
    fields = set()
    if isinstance(method.kl, KL) or isinstance(method.trust, PairLogistic):
        fields.add("logref")
    if method.sampler.values != "none":
        fields |= {"value", "next_value"} if isinstance(method.credit, GAE) else {"value"}
    if method.sampler.greedy:
        fields.add("greedy_return")
    return frozenset(fields)
