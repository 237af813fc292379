"""A method: one sampler q, the parts of one weight w, the extras that are neither, an update rule and a claim."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from apportion.core.errors import ApportionWarning, InvalidMethod, UnknownName
from apportion.core.parts import (
    GAE,
    KL,
    Aggregate,
    Baseline,
    Credit,
    Critic,
    Greedy,
    GroupMean,
    GroupStd,
    KeepBest,
    KeepMixed,
    LeaveOneOut,
    NoBaseline,
    NoKL,
    NoRatio,
    NoScale,
    NoTrust,
    PairLogistic,
    Part,
    Process,
    Ratio,
    RewardToGo,
    Scale,
    SequenceMean,
    SequenceRatio,
    SiblingMean,
    Sum,
    Total,
    Trust,
)
from apportion.core.parts.base import check_types
from apportion.core.sampler import Sampler
from apportion.core.update import Adam, NaturalGradient, ValueLoss

ClaimKind = Literal["unbiased", "(1-1/G) of the gradient", "proportional", "biased", "unstated"]
LONG_SEQUENCE = 200
"""Decisions above which a ratio of whole sequences is doubtful: it degenerates with length."""


@dataclass(frozen=True)
class Claim:
    """What the exact audit must find for the first update of a collection, on the language `toy`.

    kind: "unbiased" (the expected update is the gradient of J = E[R] - beta KL, in the units of the aggregation),
        "(1-1/G) of the gradient", "proportional" (same direction, another size), "biased" (another direction),
        or "unstated" (a variant nobody has claimed anything for).
    given: the condition, e.g. "an exact critic".
    """

    kind: ClaimKind = "unstated"
    given: str = ""

    def __str__(self) -> str:
        return self.kind + (f", given {self.given}" if self.given else "")


@dataclass(frozen=True)
class Setting:
    """A constant of the method: its symbol, its value, and where that value stands ("unstated" if nowhere)."""

    symbol: str
    value: Any
    source: str = "unstated"


_FAMILIES: dict[str, type | tuple[type, ...]] = {
    "sampler": Sampler,
    "credit": Credit,
    "baseline": Baseline,
    "scale": Scale,
    "ratio": Ratio,
    "trust": Trust,
    "aggregate": Aggregate,
    "kl": (KL, NoKL),
    "value_loss": (ValueLoss, type(None)),
    "update": (Adam, NaturalGradient),
    "claim": Claim,
}
W_PARTS = ("credit", "baseline", "scale", "ratio", "trust", "aggregate", "kl")


@dataclass(frozen=True)
class Method:
    """A policy-gradient method as (q, w). Build variants with `replace`; print it with `apportion methods NAME`.

    Raises InvalidMethod for parts that cannot work together; warns (ApportionWarning) of doubtful ones.
    """

    name: str
    sampler: Sampler = field(default_factory=Sampler)
    credit: Credit = field(default_factory=Total)
    baseline: Baseline = field(default_factory=NoBaseline)
    scale: Scale = field(default_factory=NoScale)
    ratio: Ratio = field(default_factory=NoRatio)
    trust: Trust = field(default_factory=NoTrust)
    aggregate: Aggregate = field(default_factory=Sum)
    kl: KL | NoKL = field(default_factory=NoKL)
    value_loss: ValueLoss | None = None
    entropy: float = 0.0
    update: Adam | NaturalGradient = field(default_factory=Adam)
    claim: Claim = field(default_factory=Claim)
    title: str = ""
    target: str = ""
    lineage: str = ""
    differs: str = ""
    settings: tuple[Setting, ...] = ()

    def __post_init__(self) -> None:
        for name, family in _FAMILIES.items():
            part = getattr(self, name)
            if not isinstance(part, family):
                kinds = family if isinstance(family, tuple) else (family,)
                wanted = " or ".join(k.__name__ for k in kinds if k is not type(None))
                rest = " or None" if type(None) in kinds else ""
                raise InvalidMethod(f"{self.name}.{name} is {part!r}; it must be a {wanted} part{rest}")
            if part is not None:
                check_types(part, f"{self.name}: {name}")
        for bad, why in _conflicts(self):
            if bad:
                raise InvalidMethod(f"{self.name}: {why}")
        for doubtful, why in _doubts(self):
            if doubtful:
                warnings.warn(f"{self.name}: {why}", ApportionWarning, stacklevel=3)

    @property
    def parts(self) -> dict[str, Part]:
        """The sampler and the parts of w, by name."""
        return {name: getattr(self, name) for name in ("sampler", *W_PARTS)}

    @property
    def scope(self) -> str:
        """The widest scope of any part: whose data one sibling's weight depends on."""
        order = ("trajectory", "group", "batch")
        widest = max(order.index(p.scope) for p in (*self.parts.values(), self.sampler.keep))
        return order[widest]

    def replace(self, **changes: Any) -> Method:
        """A variant with some parts replaced; its name says which, and it claims nothing unless told to.

        >>> from apportion.core.catalogue import dr_grpo
        >>> dr_grpo.replace(baseline=LeaveOneOut()).name
        'dr_grpo[baseline=LeaveOneOut()]'
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise UnknownName(f"part of {self.name}", name, known)
        changed = {k: v for k, v in changes.items() if v != getattr(self, k)}
        touched = {k: v for k, v in changed.items() if k in W_PARTS}
        if "sampler" in changed:
            touched |= _sampler_changes(self.sampler, changed["sampler"])
        if touched and "name" not in changes:
            stem, _, rest = self.name.partition("[")
            marks = ([rest[:-1]] if rest else []) + [f"{k}={v!r}" for k, v in touched.items()]
            changed["name"] = f"{stem}[{', '.join(marks)}]"
        # Group size, epochs and step size do not move the claim; a part of w, or who proposes and what stays, does.
        if set(touched) - {"group", "epochs", "minibatches", "horizon", "value_rollouts"} and "claim" not in changes:
            changed["claim"] = Claim()
        return dataclasses.replace(self, **changed)

    def set(self, path: str, value: Any) -> Method:
        """The method with one field changed by its path, as `--set part.field=value` does.

        >>> from apportion.core.catalogue import grpo
        >>> grpo.set("sampler.group", 4).sampler.group
        4
        """
        head, _, rest = path.partition(".")
        known = [*_FAMILIES, "entropy"]
        if head not in known:
            raise UnknownName(f"part of {self.name}", head, known)
        return self.replace(**{head: _set(getattr(self, head), head, rest, value)})

    def filled(self, base: Method, values: Mapping[str, Any]) -> Method:
        """The method with values by path wherever it is as `base` has it, under its own name and claim: a preset.

        >>> from apportion.core.catalogue import grpo
        >>> mine = grpo.set("sampler.group", 4).filled(grpo, {"sampler.group": 16, "update.learning_rate": 0.1})
        >>> mine.sampler.group, mine.update.learning_rate
        (4, 0.1)
        """
        method = self
        for path, value in values.items():
            if _at(method, path) == _at(base, path):
                method = method.set(path, value)
        return dataclasses.replace(method, name=self.name, claim=self.claim)

    def check_horizon(self, horizon: int) -> None:
        """Warn when a ratio of whole sequences meets trajectories of `horizon` decisions."""
        if self.ratio.per_sequence and horizon > LONG_SEQUENCE:
            warnings.warn(
                f"{self.name}: {type(self.ratio).__name__} over up to {horizon} decisions degenerates (its logarithm "
                "adds up over the trajectory, or its mean hides single decisions); consider ratio=DecisionRatio()",
                ApportionWarning,
                stacklevel=2,
            )


def _sampler_changes(old: Sampler, new: Any) -> dict[str, Any]:
    if not isinstance(new, Sampler):
        return {}
    names = [f.name for f in dataclasses.fields(old)]
    return {n: getattr(new, n) for n in names if getattr(old, n) != getattr(new, n)}


def _set(part: Any, where: str, path: str, value: Any) -> Any:
    if not path:
        return value
    head, _, rest = path.partition(".")
    if not dataclasses.is_dataclass(part):
        raise InvalidMethod(f"{where} is {part!r} and has no field '{head}'; set {where} itself")
    known = [f.name for f in dataclasses.fields(part)]
    if head not in known:
        raise UnknownName(f"field of {where} ({type(part).__name__})", head, known or ["(it has none)"])
    new = _set(getattr(part, head), f"{where}.{head}", rest, value)
    try:
        return dataclasses.replace(part, **{head: new})  # type: ignore[type-var]
    except TypeError as error:
        raise InvalidMethod(f"{where}.{head} is {new!r}, of the wrong type; it was {getattr(part, head)!r}") from error


def _conflicts(m: Method) -> list[tuple[bool, str]]:
    s = m.sampler
    groups = [p for p in (m.baseline, m.scale, m.credit, s.keep) if p.scope == "group" or isinstance(p, KeepMixed)]
    critic = isinstance(m.credit, GAE) or isinstance(m.baseline, Critic)
    return [
        (
            bool(groups) and s.group < 2,
            f"{', '.join(type(p).__name__ for p in groups)} compares siblings, but the group size is {s.group}; "
            "set sampler.group to 2 or more, or use a part that needs no siblings",
        ),
        (
            isinstance(m.trust, PairLogistic) and (s.group != 2 or s.feedback != "preference"),
            f"PairLogistic weighs chosen against rejected; it needs sampler.group=2 (not {s.group}) and "
            f"sampler.feedback='preference' (not '{s.feedback}')",
        ),
        (
            critic and s.values == "none",
            "a critic part without a critic; set sampler.values to 'critic' or 'rollouts'",
        ),
        (
            isinstance(m.credit, GAE) and not isinstance(m.baseline, Critic),
            "GAE credit is a lambda-return around the critic's value; its baseline must be Critic()",
        ),
        (
            s.values == "critic" and m.value_loss is None,
            "a critic that nothing trains; give value_loss=ValueLoss(), or sampler.values='rollouts'",
        ),
        (
            m.value_loss is not None and s.values != "critic",
            "ValueLoss trains a critic that is not there; set sampler.values='critic' or value_loss=None",
        ),
        (
            isinstance(m.baseline, Greedy) and not s.greedy,
            "Greedy() needs a greedy companion rollout; set sampler.greedy=True",
        ),
        (
            m.trust.needs_ratio and isinstance(m.ratio, NoRatio),
            f"{type(m.trust).__name__} bounds a ratio, but ratio is NoRatio(); use DecisionRatio() or NoTrust()",
        ),
        (
            s.start == "stream" and (s.group > 1 or not isinstance(m.credit, (GAE, RewardToGo))),
            "a stream cuts episodes into segments: it has no siblings (sampler.group=1) and no whole return "
            "(credit GAE or RewardToGo); set sampler.start='reset' for whole episodes",
        ),
        (
            s.feedback == "none" and isinstance(m.kl, NoKL),
            "without the task's reward only a KL to a teacher can teach; give kl=KL('reward', 'k1', beta=1.0)",
        ),
        (
            isinstance(m.credit, Process) and not isinstance(m.baseline, NoBaseline),
            "Process() already subtracts the group's mean step reward; use baseline=NoBaseline()",
        ),
        (
            not (isinstance(m.entropy, (int, float)) and 0 <= m.entropy < float("inf")),
            f"entropy is {m.entropy!r}; it must be 0 or more (it is a bonus)",
        ),
    ]


def _doubts(m: Method) -> list[tuple[bool, str]]:
    s = m.sampler
    whole = isinstance(m.baseline, (GroupMean, LeaveOneOut)) and not isinstance(m.baseline, SiblingMean)
    return [
        (
            isinstance(m.credit, (RewardToGo, Total)) and m.credit.gamma < 1 and whole,
            "subtracting whole undiscounted returns from discounted credit leaves most advantages of one "
            "sign; use SiblingMean() with RewardToGo, or Total(gamma=1) with this baseline",
        ),
        (
            isinstance(m.ratio, NoRatio)
            and s.epochs * s.minibatches > 1
            and s.proposer == "policy"
            and not isinstance(s.keep, KeepBest),
            "samples are reused without an importance ratio; set ratio=DecisionRatio() or epochs and minibatches to 1",
        ),
        (
            isinstance(m.scale, GroupStd) and s.group == 2,
            "with two siblings the group's spread only keeps the sign of their difference",
        ),
        (
            m.ratio.per_sequence and s.horizon is not None and s.horizon > LONG_SEQUENCE,
            f"{type(m.ratio).__name__} over {s.horizon} decisions degenerates; consider ratio=DecisionRatio()",
        ),
        (
            isinstance(m.ratio, SequenceRatio) and isinstance(m.credit, (RewardToGo, GAE)),
            "one ratio a sequence sums its decisions' advantages; per-decision credit is lost. "
            "Use SequenceDecisionRatio() or DecisionRatio()",
        ),
        (
            isinstance(m.ratio, SequenceRatio) and not m.ratio.geometric and not isinstance(m.aggregate, SequenceMean),
            f"{type(m.aggregate).__name__} counts a trajectory's one ratio once for each of its decisions, so long "
            "ones weigh more; use aggregate=SequenceMean(), which counts it once",
        ),
        (
            isinstance(m.kl, KL) and m.kl.place == "loss" and m.kl.estimator == "k1" and not m.kl.corrected,
            "k1 in the loss has zero expected gradient; use place='reward', or estimator='k2'",
        ),
    ]


def _at(part: Any, path: str) -> Any:
    """The field at a path; None where there is none."""
    for name in path.split("."):
        part = getattr(part, name, None)
    return part
