"""The page: one table and eight plots in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from apportion.audit.figures.rows import HEADER, Figure, Plot, Row, cells

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2126; --line: #dde1e6; --out: #fdecea; --note: #fff7e0; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e8eaee; --line: #333a45; --out: #4a2320; --note: #3d3420; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } tr.OUT td { background: var(--out); }
tr.corrected td { background: var(--note); } .plot { margin: 2rem 0; } .scroll { overflow-x: auto; }
td:nth-child(2), td:nth-child(8) { min-width: 14rem; }
td:nth-child(6), td:nth-child(7) { white-space: nowrap; }
"""
COLORS = ("#3f8fc4", "#d9694f", "#4a9a56", "#8a5a9e", "#b8860b", "#2a9d8f", "#7a7a7a", "#d1495b", "#4d6cfa", "#6b8e23")
DASHES = ("solid", "dash", "dot")
INK, GRID = "#808893", "rgba(128, 136, 147, 0.25)"
"""Legible on the light page and on the dark one."""
NUMERIC = (0, 2, 3, 4)


def _draw(plot: Plot) -> Any:
    import plotly.graph_objects as go  # slow to import, and only the page needs it

    figure = go.Figure()
    for i, s in enumerate(plot.series):
        color, dash = COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]
        x, y = list(s.x), list(s.y)
        if s.mode == "bars":
            figure.add_bar(name=s.name, x=x, y=y, marker_color=color)
        else:
            line, marker = {"color": color, "dash": dash}, {"color": color, "size": 8}
            figure.add_scatter(name=s.name, x=x, y=y, mode=s.mode, line=line, marker=marker)
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font_color=INK,
        title=plot.title,
        height=430 + 22 * ((len(plot.series) + 3) // 4),
        margin={"l": 60, "r": 15, "t": 60, "b": 60},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0},
        xaxis_gridcolor=GRID,
        yaxis_gridcolor=GRID,
        xaxis_zeroline=False,
        yaxis_zeroline=False,
        xaxis_title=plot.x,
        yaxis_title=plot.y,
        xaxis_type="log" if "x" in plot.log else None,
        yaxis_type="log" if "y" in plot.log else None,
        yaxis_exponentformat="power" if "y" in plot.log else None,
    )
    return figure


def _table(rows: Sequence[Row]) -> str:
    number = [' class="n"' if i in NUMERIC else "" for i in range(len(HEADER))]
    head = "".join(f'<th scope="col"{n}>{escape(h)}</th>' for n, h in zip(number, HEADER, strict=True))
    body = []
    for row, line in zip(rows, cells(rows), strict=True):
        marked = "".join(f"<td{n}>{escape(c)}</td>" for n, c in zip(number, line, strict=True))
        body.append(f'<tr class="{row.verdict}">{marked}</tr>')
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="published and ours">{table}</div>'


def page(figures: Sequence[Figure]) -> str:
    """One HTML document with plotly.js inside it, once."""
    import plotly.io

    rows = [row for f in figures for row in f.rows]
    plots, first = [], True
    for f in figures:
        if f.plot is not None:
            config = {"displayModeBar": False, "responsive": True}
            html = plotly.io.to_html(_draw(f.plot), include_plotlyjs=first, full_html=False, config=config)
            plots.append(f'<div class="plot">{html}</div>')
            first = False
    title = "The exact toy language: published figures and ours"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{_table(rows)}{''.join(plots)}</body></html>\n"
    )
