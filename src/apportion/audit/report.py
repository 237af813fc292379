"""The audit: a method's expected update against the gradient of its own objective, and where following it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.audit.expectation import Moments, moments, true_gradient
from apportion.audit.flow import follow, schedule
from apportion.audit.tables import quietly
from apportion.core.errors import ApportionError, UnknownName
from apportion.core.method import Method
from apportion.core.parts import KL, PairLogistic
from apportion.toy import policy as toy
from apportion.toy.collect import BETA
from apportion.toy.language import Language
from apportion.toy.language import language as load
from apportion.toy.train import preset

EXACT = 1e-9
"""Relative error below which two exact numbers are the same."""
OFF = 1e-6
"""Distance of a cosine or a size ratio from 1 above which they are not."""
POLICIES = ("reference", "optimum", "perturbed")
T95 = 2.09
"""Student's t for 20 blocks of replicates."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """An expected update against a true gradient."""

    cosine: float
    size_ratio: float
    bias_norm: float
    relative: float
    """Bias over the gradient's norm."""
    errors: tuple[float, float] | None = None
    """Half widths of the 95% intervals of cosine and size ratio, where the update is replicated."""


@dataclass(frozen=True, eq=False)
class Report:
    """What the audit found; the fields are the JSON keys. Lists are per prompt; nan is printed as null.

    cosine, size_ratio, bias_norm: of the expected update against the gradient. variance, snr: of one group of every
    prompt. prompt_weight: each prompt's update projected on its own gradient, in units of it. zero_signal: chance
    that a prompt's group says nothing. length_drift: change of the mean correct and wrong length (decisions) per
    unit of learning rate. target: where following the expected update ends.
    """

    method: str
    task: str
    how: str
    cosine: float
    size_ratio: float
    bias_norm: float
    variance: float
    snr: float
    prompt_weight: list[float]
    success_rate: list[float]
    zero_signal: list[float]
    length_drift: dict[str, float]
    target: dict[str, Any]
    claim: str
    claim_holds: bool | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain types, without the notes; a number that does not exist is None."""
        return {k: _plain(v) for k, v in self.__dict__.items() if k != "notes"}

    def lines(self) -> str:
        """The report as text."""
        rows = [
            ("how", self.how),
            ("cosine with the gradient", _short(self.cosine)),
            ("size ratio", _short(self.size_ratio)),
            ("norm of the bias", _short(self.bias_norm)),
            ("variance (one group a prompt)", _short(self.variance)),
            ("signal to noise", _short(self.snr)),
            ("length drift, correct", _short(self.length_drift["correct"])),
            ("length drift, wrong", _short(self.length_drift["wrong"])),
            ("ends at KL to pi*", _short(self.target["kl_to_optimum"])),
            ("ends at KL to the reference", _short(self.target["kl_to_reference"])),
            ("ends at expected reward", _short(self.target["expected_reward"])),
            ("claim", self.claim),
            ("claim holds", {True: "yes", False: "NO", None: "nothing claimed"}[self.claim_holds]),
        ]
        body = [
            f"{self.method} on {self.task}",
            *(f"  {k:<30} {v}" for k, v in rows),
            "",
            "  prompt  success  zero signal  weight",
        ]
        for n, (s, z, w) in enumerate(zip(self.success_rate, self.zero_signal, self.prompt_weight, strict=True)):
            body.append(f"  {n:>6}  {s:>7.3f}  {z:>11.3f}  {w:>6.3f}")
        return "\n".join([*body, *(f"  note: {n}" for n in self.notes)])


def _short(x: float) -> str:
    return "-" if x is None or not math.isfinite(x) else f"{x:.6g}"


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def policy_of(name: str, language: Language) -> np.ndarray:
    """Logits [N, K, V] by name: the reference, pi*, or the reference with normal noise on its logits.

    Raises UnknownName.
    """
    if name == "reference":
        return language.reference
    if name == "optimum":
        return toy.tilted(language, BETA).logits
    if name == "perturbed":
        noise = np.random.default_rng(0).normal(scale=0.5, size=language.reference.shape)
        return language.reference + noise
    raise UnknownName("policy", name, POLICIES)


def compare(found: Moments, gradient: np.ndarray) -> Comparison:
    """The expected update against the gradient; ratios are nan where the gradient is 0."""
    u, g = found.update, gradient
    size, norm = _norm(u), _norm(g)
    if norm == 0 or size == 0:
        return Comparison(math.nan, math.nan, _norm(u - g), math.inf if size else math.nan)
    errors = None
    if found.blocks is not None:
        errors = _intervals(found.blocks, g)
        size = math.sqrt(max(_square(found.blocks), 1e-300))
    return Comparison(float((u * g).sum()) / size / norm, size / norm, _norm(u - g), _norm(u - g) / norm, errors)


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).sum()))


def _square(blocks: np.ndarray) -> float:
    """||E u||² from independent estimates, without the noise that a squared mean would add."""
    B = len(blocks)
    return float(((blocks.sum(axis=0) ** 2).sum() - (blocks**2).sum()) / (B * (B - 1)))


def _intervals(blocks: np.ndarray, g: np.ndarray) -> tuple[float, float]:
    """Half widths of cosine and size ratio, by leaving out one block at a time."""
    B, norm, pairs = len(blocks), _norm(g), []
    for b in range(B):
        rest = np.delete(blocks, b, axis=0)
        size = math.sqrt(max(_square(rest), 1e-300))
        pairs.append((float((rest.mean(axis=0) * g).sum()) / size / norm, size / norm))
    spread = np.sqrt((B - 1) / B * ((np.array(pairs) - np.mean(pairs, axis=0)) ** 2).sum(axis=0))
    return float(T95 * spread[0]), float(T95 * spread[1])


def holds(kind: str, group: int, found: list[Comparison]) -> bool | None:
    """Whether a claim holds at every policy compared (a bias must show at one of them); None if nothing is claimed."""
    exact = [c for c in found if not math.isnan(c.cosine)]
    if kind == "unstated" or not exact:
        return None
    if kind == "biased":
        return any(1 - c.cosine > OFF + (c.errors[0] if c.errors else 0.0) for c in exact)
    straight = all(1 - c.cosine <= (c.errors[0] if c.errors else EXACT) for c in exact)
    if kind == "proportional":
        return straight and any(abs(c.size_ratio - 1) > OFF + (c.errors[1] if c.errors else 0.0) for c in exact)
    factor = 1.0 if kind == "unbiased" else 1 - 1 / group
    return straight and all(abs(c.size_ratio - factor) <= (c.errors[1] if c.errors else EXACT) for c in exact)


def length_drift(language: Language, logits: np.ndarray, update: np.ndarray) -> dict[str, float]:
    """Directional derivative of the mean correct and wrong length along an update, mean over prompts."""
    mass, length = toy.mass(language, logits), language.length
    drift = {}
    for name, chosen in (("correct", language.reward), ("wrong", 1 - language.reward)):
        p = (mass * chosen).sum(axis=-1, keepdims=True)
        mean = (mass * chosen * length).sum(axis=-1, keepdims=True) / np.where(p > 0, p, 1.0)
        slope = mass * chosen * (length - mean) / np.where(p > 0, p, 1.0)
        gradient = toy.score_sum(language, logits, slope[..., None])
        drift[name] = float((gradient * update).sum(axis=(1, 2)).mean())
    return drift


def audit(
    method: Method,
    task: str = "toy",
    group: int | None = 8,
    policy: str = "reference",
    beta: float | None = None,
    seed: int = 0,
) -> Report:
    """Audit a method on `toy` or `toy-eos` with `group` siblings (None: its own) at a policy.

    The audited update is the first of a collection (ratio 1), without entropy bonus, value regression or
    preconditioning. The gradient is of J = E[R] - beta KL(pi || pi_ref) with the method's own beta (0 without a KL), or
    of -KL(pi || teacher) for a distillation. The claim is measured at `policy` and at a second one, because at
    the reference a KL has no gradient. The target is run with beta = 0.5 where the method has one.

    Raises UnknownName for a task or policy, InvalidMethod for a group too small for the parts.
    """
    language = load(task)
    if beta is not None:
        method = with_beta(method, beta)
    at = policy_of(policy, language)
    found, gradient = moments(method, language, at, group, seed), true_gradient(method, language, at)
    first = compare(found, gradient)
    return Report(
        method=method.name,
        task=task,
        how=found.how + _stated(first),
        cosine=first.cosine,
        size_ratio=first.size_ratio,
        bias_norm=first.bias_norm,
        variance=found.variance,
        snr=float((found.update**2).sum() / found.variance) if found.variance > 0 else math.inf,
        prompt_weight=_projection(found.update, gradient),
        success_rate=toy.expected_reward(language, at).tolist(),
        zero_signal=found.silent.tolist(),
        length_drift=length_drift(language, at, found.update),
        target=_target(method, language, group),
        claim=str(method.claim),
        claim_holds=measure_claim(method, language, first, policy, group, seed),
        notes=_notes(method, language),
    )


def measure_claim(
    method: Method,
    language: Language,
    first: Comparison | None = None,
    policy: str = "reference",
    group: int | None = 8,
    seed: int = 0,
) -> bool | None:
    """Whether the method's claim holds at `policy` (compared already, or now) and at a second one."""
    names = ["reference" if policy == "perturbed" else "perturbed", *([] if first else [policy])]
    found = [first] if first else []
    for name in names:
        at = policy_of(name, language)
        found.append(compare(moments(method, language, at, group, seed), true_gradient(method, language, at)))
    return holds(method.claim.kind, group or method.sampler.group, found)


def with_beta(method: Method, beta: float) -> Method:
    """The method with its penalty at `beta`, in reward per nat. Raises ApportionError if it has none."""
    if isinstance(method.trust, PairLogistic):
        return quietly(method, trust=method.trust.replace(beta=beta))
    if isinstance(method.kl, KL):
        return quietly(method, kl=method.kl.replace(beta=beta))
    raise ApportionError(f"beta is {beta}, but {method.name} has no KL penalty; leave it out, or set kl=KL(...)")


def _projection(update: np.ndarray, gradient: np.ndarray) -> list[float]:
    """Each prompt's update along its own gradient, in units of that gradient."""
    own = (gradient * gradient).sum(axis=(1, 2))
    along = (update * gradient).sum(axis=(1, 2))
    return np.divide(along, own, out=np.full(len(own), np.nan), where=own > 0).tolist()


def _stated(c: Comparison) -> str:
    return f": cosine ±{c.errors[0]:.2g}, size ratio ±{c.errors[1]:.2g}" if c.errors else ""


def _target(method: Method, language: Language, group: int | None) -> dict[str, Any]:
    """Where the method ends with the figures' penalty, and how it got there."""
    steps, rate = schedule(method, language)
    end = follow(preset(method), language, group=group, steps=steps, rate=rate).final
    names = ("kl_to_optimum", "kl_to_reference", "expected_reward")
    penalised = isinstance(method.trust, PairLogistic) or isinstance(method.kl, KL)
    beta = BETA if penalised and method.sampler.feedback != "none" else method.kl.beta
    return {k: end[k] for k in names} | {"beta": beta, "optimum_beta": BETA, "steps": steps}


def _notes(method: Method, language: Language) -> tuple[str, ...]:
    """What the numbers leave out."""
    s, (steps, rate) = method.sampler, schedule(method, language)
    notes = [f"target: {steps} Adam steps of {rate} along the expected update; pi* is at beta = {BETA}"]
    if isinstance(method.kl, KL) or isinstance(method.trust, PairLogistic):
        if s.feedback != "none":
            notes.append(f"target: the method's own beta is set to {BETA}, that of pi*")
    elif s.feedback != "none":
        notes.append("target: without a penalty nothing holds the policy back; it is still on its way to argmax E[R]")
    if language.name != "toy":
        notes.append("the catalogue claims what it claims of `toy`, where all responses have one length")
    if s.values == "critic":
        notes.append("values are exact: this is the method with a perfect critic")
    if s.values == "rollouts":
        notes.append("values are exact: the noise of their rollouts is left out of the variance")
    if s.start == "stream":
        notes.append("a stream has no siblings: one whole response a prompt, not cut into segments")
    if s.feedback == "preference":
        notes.append("a group is one labelled pair")
    if s.proposer == "reference":
        notes.append("proposals come from the reference, not from the policy")
    if method.entropy:
        notes.append("the entropy bonus is left out")
    return tuple(notes)
