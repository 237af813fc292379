"""One method's card: every part with its equation, values and source, and what the method claims."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from apportion.core.method import Method
from apportion.core.sampler import Sampler
from apportion.study.family import row


def _parts(m: Method) -> dict[str, Any]:
    extras = {"value_loss": m.value_loss, "update": m.update}
    return m.parts | {"keep": m.sampler.keep} | {name: part for name, part in extras.items() if part is not None}


def _fill(label: str, text: str, width: int, gap: int = 14) -> str:
    return textwrap.fill(text, width, initial_indent=f"  {label:<{gap - 2}}", subsequent_indent=" " * gap)


def _show(part: Any) -> str:
    """The part with its values; of the many of a sampler only those that are not the usual ones."""
    if not isinstance(part, Sampler):
        return repr(part)
    usual = Sampler()
    fields = [f.name for f in dataclasses.fields(part) if getattr(part, f.name) != getattr(usual, f.name)]
    return f"Sampler({', '.join(f'{name}={getattr(part, name)!r}' for name in fields)})"


def card(m: Method, width: int = 100) -> str:
    """The card as text.

    >>> from apportion.core.catalogue import reinforce
    >>> "C_t = sum_s gamma^s r_s" in card(reinforce)
    True
    """
    width = max(width, 50)
    lines = [f"{m.title or m.name} ({m.name})", "", "Parts"]
    for name, part in _parts(m).items():
        lines.append(_fill(name, _show(part), width))
        if part.equation:
            lines.append(_fill("", part.equation, width))
        if part.source != "unstated":
            lines.append(_fill("", part.source, width))
    if m.entropy:
        lines.append(_fill("entropy", str(m.entropy), width))
    if m.settings:
        lines += ["", "Settings"]
        lines += [textwrap.fill(f"  {s.symbol} = {s.value}: {s.source}", width) for s in m.settings]
    lines += ["", "Family"]
    lines += [_fill(k, v, width, gap=26) for k, v in row(m).items() if k != "method" and v]
    lines += ["", "Claim (of the first expected update)", f"  {m.claim}"]
    lines += ["", "Differs from the paper in", textwrap.indent(textwrap.fill(m.differs or "unstated", width - 2), "  ")]
    return "\n".join(lines)


def markdown(m: Method) -> str:
    """The card as a section of Markdown."""
    lines = [f"## {m.title or m.name} (`{m.name}`)", "", f"{m.lineage}.", ""]
    lines += ["| part | value | equation | source |", "|---|---|---|---|"]
    for name, part in _parts(m).items():
        cells = (name, f"`{_show(part)}`", f"`{part.equation}`" if part.equation else "", part.source)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    lines += ["", f"- **Claim** of the first expected update: {m.claim}.", f"- **Target**: {m.target or 'unstated'}."]
    lines += [f"- **Differs from the paper in**: {m.differs or 'unstated'}."]
    settings = "; ".join(f"{s.symbol} = {s.value} ({s.source})" for s in m.settings)
    lines += [f"- **Settings**: {settings}."] if settings else []
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Dataclasses as objects with their type; everything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        out: dict[str, Any] = {"type": type(value).__name__, "fields": fields}
        for name in ("equation", "source", "scope"):
            if hasattr(value, name):
                out[name] = getattr(value, name)
        return out
    return list(value) if isinstance(value, tuple) else value


def record(m: Method) -> dict[str, Any]:
    """The card as plain data, ready for JSON."""
    return {
        "name": m.name,
        "title": m.title,
        **{name: _plain(part) for name, part in m.parts.items()},
        "value_loss": _plain(m.value_loss),
        "entropy": m.entropy,
        "update": _plain(m.update),
        "scope": m.scope,
        "claim": {"kind": m.claim.kind, "given": m.claim.given},
        "target": m.target,
        "lineage": m.lineage,
        "differs": m.differs,
        "settings": [{"symbol": s.symbol, "value": _plain(s.value), "source": s.source} for s in m.settings],
        "family": row(m),
    }
