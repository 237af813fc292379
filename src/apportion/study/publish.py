"""A study's report as files: one HTML page without network, Markdown, CSV, and the table in Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from apportion import __version__
from apportion.core.errors import UnknownName
from apportion.runs.files import read_json, write_atomic
from apportion.study import findings, report
from apportion.study.files import SOURCE, TUNING, read_record
from apportion.study.findings import Part, Table, Text
from apportion.study.report import Chart
from apportion.study.results import Results, results
from apportion.study.table import load, save

METHODS = "methods.json"
PAGE, MARKDOWN, NUMBERS = "report.html", "report.md", "results.csv"


def write(out: Path) -> Path:
    """Write evaluations.parquet, report.html, report.md and results.csv into a study's folder; returns the page's path.

    Of a study that still runs, it shows what has ended. Raises ApportionError for a folder without a study.
    """
    found, parts, table = _gather(out)
    save(table, out)
    write_atomic(out / PAGE, page(out, found, parts).encode())
    write_atomic(out / MARKDOWN, markdown(out, found, parts).encode())
    write_atomic(out / NUMBERS, _csv(["method", "task", "statistic", "value", "low", "high"], numbers(found)).encode())
    return out / PAGE


def figure(out: Path, name: str) -> str:
    """The numbers of one figure or table of the report, as CSV. Raises UnknownName for another."""
    parts = {p.id: p for p in _gather(out)[1] if not isinstance(p, Text)}
    if name not in parts:
        raise UnknownName("figure", name, parts)
    part = parts[name]
    if isinstance(part, Table):
        return _csv(part.header, part.rows)
    points = [[c.label, *row] for c in part.curves for row in zip(c.x, c.mean, c.low, c.high, strict=True)]
    return _csv(["method", part.x_title, "mean", "low", "high"], points)


def _gather(out: Path) -> tuple[Results, list[Part], Any]:
    record, table = read_record(out), load(out)
    found = results(table, record)
    tuning = read_json(out / TUNING, "what tuning chose") if (out / TUNING).exists() else None
    return found, findings.parts(found, table, read_json(out / METHODS, "the methods of a study"), tuning), table


def _csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def numbers(found: Results) -> list[list[Any]]:
    """Every statistic of every method, on each task and over all."""
    rows: list[list[Any]] = []
    for arm in found.record["arms"]:
        if arm in found.arms:
            rows += [[arm, "all", name, *e] for name, e in found.aggregate(arm).items()]
        for task in [t for t in found.tasks if (arm, t) in found.scores]:
            for name, value in found.on_task(arm, task).items():
                rows.append([arm, task, name, *(value if isinstance(value, tuple) else (value, "", ""))])
    for p in found.pairs():
        rows.append([f"{p.first} - {p.second}", "all", "probability of improvement", *p.better])
        rows.append([f"{p.first} - {p.second}", "all", "paired difference", *p.difference])
        rows.append([f"{p.first} - {p.second}", "all", "p (Holm)", p.corrected, "", ""])
    return rows


def _command(out: Path, part: Part) -> str:
    return "" if isinstance(part, Text) else f"apportion report {out} --figure {part.id}"


def _again(out: Path) -> str:
    """What to type to have all runs once more."""
    return f"apportion study {out / SOURCE} --out NEW" if (out / SOURCE).exists() else "the script that began the study"


def _incomplete(found: Results) -> str:
    """A sentence on runs that have not ended; empty when all have."""
    wanted = sum(cell["trial"] is None for cell in found.record["cells"])
    ended = sum(len(s) for s in found.scores.values())
    return "" if ended == wanted else f"{ended} of {wanted} runs have ended; the others are not in any number here."


def page(out: Path, found: Results, parts: Sequence[Part]) -> str:
    """The report as one HTML page."""
    links = ", ".join(f'<a href="#{escape(p.id)}-title">{escape(p.title)}</a>' for p in parts)
    warning = _incomplete(found)
    body = [f"<p><strong>{escape(warning)}</strong></p>"] if warning else []
    body += [f'<nav aria-label="Contents"><p class="note">{links}</p></nav>', *(_html(out, part) for part in parts)]
    footer = f"apportion {__version__}, {date.today().isoformat()}. All runs again: <code>{escape(_again(out))}</code>"
    return report.page(found.record["title"], "\n".join(body), [p for p in parts if isinstance(p, Chart)], footer)


def _html(out: Path, part: Part) -> str:
    told = f'<p class="note">The numbers: <code>{escape(_command(out, part))}</code></p>'
    if isinstance(part, Chart):
        return part.html().removesuffix("</section>") + told + "</section>"
    head = (
        f'<section id="{escape(part.id)}" aria-labelledby="{escape(part.id)}-title">'
        f'<h2 id="{escape(part.id)}-title">{escape(part.title)}</h2><p class="note">{escape(part.note)}</p>'
    )
    if isinstance(part, Text):
        blocks = "".join(
            f'<details><summary>{escape(h)}</summary><pre tabindex="0">{escape(t)}</pre></details>'
            for h, t in part.folded
        )
        return f"{head}{blocks}</section>"
    return f"{head}{report.table(part.header, part.rows, part.title, swatches=part.swatches)}{told}</section>"


def markdown(out: Path, found: Results, parts: Sequence[Part]) -> str:
    """The report as Markdown: the same tables, the ends of the curves, the cards."""
    lines = [f"# {found.record['title']}", "", _incomplete(found)]
    for part in parts:
        lines += ["", f"## {part.title}", "", part.note, ""]
        if isinstance(part, Text):
            lines += [line for h, t in part.folded for line in (f"### {h}", "", "```text", t, "```", "")]
            continue
        header, rows = (part.header, part.rows) if isinstance(part, Table) else part.last()
        lines += [_row(header), "|---" * len(header) + "|", *(_row(r) for r in rows)]
        lines += ["", f"`{_command(out, part)}`"]
    return "\n".join([*lines, "", f"All runs once more: `{_again(out)}`", ""])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
