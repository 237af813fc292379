"""The family table: what tells the methods apart, read off their parts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from apportion.core.method import Method
from apportion.core.parts import (
    GAE,
    KL,
    BatchStd,
    Cap,
    Clip,
    GroupStd,
    Imitate,
    KeepAll,
    NoBaseline,
    NoTrust,
    PairLogistic,
    Part,
    Process,
    RewardToGo,
    SequenceRatio,
)
from apportion.core.update import NaturalGradient

_RATIO = {"NoRatio": "", "DecisionRatio": "rho_t", "SequenceRatio": "s", "SequenceDecisionRatio": "s_t"}
_CREDIT = {"Total": "return", "RewardToGo": "return to go", "Imitate": "1", "Process": "later step rewards, normalised"}


def words(part: Part) -> str:
    """The part's name in words.

    >>> from apportion.core.parts import LeaveOneOut
    >>> words(LeaveOneOut()), words(GAE())
    ('leave one out', 'GAE')
    """
    name = type(part).__name__
    return name if name.isupper() else re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def _advantage(m: Method) -> str:
    if isinstance(m.credit, GAE):
        values = "the critic" if m.sampler.values == "critic" else f"the mean of {m.sampler.value_rollouts} rollouts"
        text = f"GAE({m.credit.gamma}, {m.credit.lam}) around {values}"
    else:
        text = _CREDIT[type(m.credit).__name__]
        text += "" if isinstance(m.baseline, NoBaseline) else f" - {words(m.baseline)}"
    if isinstance(m.scale, GroupStd):
        text = f"({text}) / group std"
    if isinstance(m.scale, BatchStd):
        text += f", {'whitened' if m.scale.center else 'scaled'} over the batch"
    return f"{text}, KL in the reward" if isinstance(m.kl, KL) and m.kl.place == "reward" else text


def _step_size(m: Method) -> str:
    if isinstance(m.trust, Clip):
        band = f"{m.trust.low}" if m.trust.low == m.trust.high else f"{m.trust.low}/{m.trust.high}"
        dual = f", dual {m.trust.dual}" if m.trust.dual else ""
        return f"clip {band}{dual} per {'sequence' if m.ratio.per_sequence else 'decision'}"
    if isinstance(m.trust, Cap):
        return f"ratio capped to [{m.trust.low:g}, {m.trust.high:g}]"
    if isinstance(m.trust, PairLogistic):
        return "sigmoid of the pair's margin"
    if isinstance(m.update, NaturalGradient):
        return f"KL region of {m.update.delta} nats"
    return "learning rate"


def _extra_models(m: Method) -> str:
    models = ["critic"] if m.sampler.values == "critic" else []
    if m.sampler.feedback == "none":
        models.append("teacher")
    elif isinstance(m.kl, KL) or isinstance(m.trust, PairLogistic):
        models.append("reference")
    return ", ".join(models) or "none"


def _samples(m: Method) -> str:
    s = m.sampler
    start = {"stream": ", a stream", "visited": " from visited states"}.get(s.start, "")
    facts = [f"{s.proposer}{start}"]
    facts += [f"{s.group} siblings"] if s.group > 1 else []
    facts += ["a greedy companion"] if s.greedy else []
    facts += [] if isinstance(s.keep, KeepAll) else [words(s.keep)]
    facts += [f"{s.epochs} epochs"] if s.epochs > 1 else []
    return ", ".join(facts)


def _weight(m: Method) -> str:
    keep = "" if isinstance(m.sampler.keep, KeepAll) else "keep"
    advantage = "" if isinstance(m.credit, Imitate) else "A"
    gate = "" if isinstance(m.trust, NoTrust) else "gate"
    factors = [f for f in (keep, advantage, _RATIO[type(m.ratio).__name__], gate) if f] or ["1"]
    text = f"{' · '.join(factors)} / {m.aggregate.equation.removeprefix('share = 1 / ')}"
    return f"{text}, less beta · {m.kl.estimator}'" if isinstance(m.kl, KL) and m.kl.place == "loss" else text


def _granularity(m: Method) -> str:
    if isinstance(m.credit, Process):
        return "step"
    fine = isinstance(m.credit, (RewardToGo, GAE)) and not isinstance(m.ratio, SequenceRatio)
    return "decision" if fine else "trajectory"


def row(m: Method) -> dict[str, str]:
    """The columns of one method."""
    return {
        "method": m.name,
        "baseline or advantage": _advantage(m),
        "step-size control": _step_size(m),
        "extra models": _extra_models(m),
        "samples from": _samples(m),
        "per-sample weight": _weight(m),
        "credit granularity": _granularity(m),
        "target": m.target,
        "lineage": m.lineage,
    }


def table(methods: Iterable[Method]) -> Any:
    """The family as a `rich` table."""
    from rich import box
    from rich.table import Table

    rows = [row(m) for m in methods]
    out = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for column in rows[0]:
        out.add_column(column, no_wrap=column == "method", overflow="fold")
    for r in rows:
        out.add_row(*r.values())
    return out


def blocks(methods: Iterable[Method], width: int) -> str:
    """The family as one block a method, for terminals too narrow for the table."""
    lines: list[str] = []
    for m in methods:
        name, *rest = row(m).items()
        lines.append(name[1])
        for column, text in rest:
            indent = " " * 25
            lines.append(textwrap.fill(f"  {column:<23}{text}", max(width, 50), subsequent_indent=indent))
        lines.append("")
    return "\n".join(lines)


def markdown(methods: Iterable[Method]) -> str:
    """The family as a Markdown table."""
    rows = [row(m) for m in methods]
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in r.values()) + " |" for r in rows]
    return "\n".join(lines)
