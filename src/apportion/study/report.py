"""One self-contained HTML page: tables, learning curves with bands, and no request to any network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True)
class Curve:
    """A line with its band: x and y of the same length. colour: its place in the palette, None for its own place."""

    label: str
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves on one pair of axes. note: what is drawn, in a sentence. log: logarithmic y.

    top: where the y axis ends; None fits it to the curves. edges: what the band's edges are.
    """

    id: str
    title: str
    note: str
    x_title: str
    y_title: str
    curves: list[Curve]
    log: bool = False
    top: float | None = None
    edges: tuple[str, str] = ("lowest", "highest")

    def last(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows of the numbers at the curves' ends."""
        rows = [[c.label, f"{c.mean[-1]:.4g}", f"{c.low[-1]:.4g}", f"{c.high[-1]:.4g}"] for c in self.curves]
        return ["method", "mean", *self.edges], rows

    def html(self) -> str:
        """Heading, place of the drawing, and the last values as a table for who cannot see it."""
        numbers = table(*self.last(), f"{self.y_title}, at the end")
        return (
            f'<section aria-labelledby="{self.id}-title"><h2 id="{self.id}-title">{escape(self.title)}</h2>'
            f'<p class="note">{escape(self.note)}</p>'
            f'<div class="chart" id="{self.id}" role="img" aria-label="{escape(self.title)}: line chart"></div>'
            f"<details><summary>The numbers at the end</summary>{numbers}</details></section>"
        )


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], label: str, kind: str = "", swatches: bool = False
) -> str:
    """An HTML table in a box that scrolls by itself; the first column heads its row.

    label: what a screen reader calls the box. kind: its CSS class.
    swatches: mark each row with the colour of the curve of the same place.
    """

    def number(text: str) -> str:
        return ' class="number"' if text[:1] in "-0123456789<>" else ""

    head = "".join(f'<th scope="col"{number(r)}>{escape(h)}</th>' for h, r in zip(header, rows[0], strict=True))
    body = ""
    for i, (first, *rest) in enumerate(rows):
        mark = f'<span class="swatch" data-index="{i}"></span>' if swatches else ""
        cells = "".join(f"<td{number(text)}>{escape(text)}</td>" for text in rest)
        body += f'<tr><th scope="row">{mark}{escape(first)}</th>{cells}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def page(title: str, body: str, charts: Sequence[Chart], footer: str = "") -> str:
    """The page as text; `body` is HTML, the drawings go where `Chart.html` left their places."""
    from plotly.offline import get_plotlyjs

    text = files("apportion.study").joinpath("report.html").read_text(encoding="utf-8")
    # A closing tag inside the data would end the script early.
    data = json.dumps([asdict(c) for c in charts]).replace("</", "<\\/")
    # Drawn data and the library go last: nothing is looked for inside them.
    filled = {"title": escape(title), "body": body, "footer": footer, "charts": data, "plotly": get_plotlyjs()}
    for name, value in filled.items():
        text = text.replace("{{" + name + "}}", value)
    return text
