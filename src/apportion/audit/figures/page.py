"""The page: one table and eight plots in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from apportion.audit.figures.rows import HEADER, Figure, Plot, Row, cells

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; }
body { max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #dde1e6; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr.OUT td { background: #fdecea; }
tr.corrected td { background: #fff7e0; } .plot { margin: 2rem 0; }
td:nth-child(6), td:nth-child(7) { white-space: nowrap; }
"""
COLORS = ("#1f5f8b", "#c8553d", "#3a7d44", "#8a5a9e", "#b8860b", "#2a9d8f", "#7a7a7a", "#d1495b", "#4d6cfa", "#6b8e23")
DASHES = ("solid", "dash", "dot")


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
        template="plotly_white",
        title=plot.title,
        height=430,
        margin={"l": 70, "r": 20, "t": 60, "b": 60},
        xaxis_title=plot.x,
        yaxis_title=plot.y,
        xaxis_type="log" if "x" in plot.log else None,
        yaxis_type="log" if "y" in plot.log else None,
        yaxis_exponentformat="power" if "y" in plot.log else None,
    )
    return figure


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in HEADER)
    body = []
    for row, line in zip(rows, cells(rows), strict=True):
        marked = "".join(
            f'<td class="n">{escape(c)}</td>' if i in (0, 2, 3, 4) else f"<td>{escape(c)}</td>"
            for i, c in enumerate(line)
        )
        body.append(f'<tr class="{row.verdict}">{marked}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def page(figures: Sequence[Figure]) -> str:
    """One HTML document with plotly.js inside it, once."""
    import plotly.io

    rows = [row for f in figures for row in f.rows]
    plots, first = [], True
    for f in figures:
        if f.plot is not None:
            html = plotly.io.to_html(
                _draw(f.plot), include_plotlyjs=first, full_html=False, config={"displaylogo": False}
            )
            plots.append(f'<div class="plot">{html}</div>')
            first = False
    title = "The exact toy language: published figures and ours"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{_table(rows)}{''.join(plots)}</body></html>\n"
    )
