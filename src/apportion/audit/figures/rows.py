"""What a figure yields: rows of a table, published against ours, and the data of a plot."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One published number and ours.

    tolerance: largest |ours - published| that passes. correction: the published number is wrong or another
    quantity, for the reason in `remark`; the row is shown and never fails.
    """

    figure: int
    quantity: str
    published: float | None
    ours: float
    tolerance: float | None
    how: str = "exact"
    remark: str = ""
    correction: bool = False

    @property
    def within(self) -> bool | None:
        """Whether the row passes; None where there is nothing to compare with."""
        if self.correction or self.published is None or self.tolerance is None:
            return None
        return abs(self.ours - self.published) <= self.tolerance

    @property
    def verdict(self) -> str:
        """One word for the table."""
        return {True: "within", False: "OUT", None: "corrected" if self.correction else "-"}[self.within]


@dataclass(frozen=True)
class Series:
    """One curve or set of points or bars."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    mode: Literal["lines", "markers", "bars"] = "lines"


@dataclass(frozen=True)
class Plot:
    """One plot of the page. `log`: axes that are logarithmic, out of "x" and "y"."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure of the testbed."""

    number: int
    rows: Sequence[Row] = field(default_factory=tuple)
    plot: Plot | None = None


HEADER = ("figure", "quantity", "published", "ours", "tolerance", "verdict", "how", "remark")


def _number(x: float | None) -> str:
    if x is None:
        return "-"
    return f"{x:.1e}" if x != 0 and abs(x) < 1e-3 else f"{x:.4g}"


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text, in the order of `HEADER`."""
    return [
        (
            str(r.figure),
            r.quantity,
            _number(r.published),
            _number(r.ours),
            _number(r.tolerance),
            r.verdict,
            r.how,
            r.remark,
        )
        for r in rows
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, with a count of those out of tolerance below."""
    lines = [HEADER, *cells(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    numeric = (0, 2, 3, 4)
    text = [
        "  ".join(
            c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    out = sum(r.within is False for r in rows)
    compared = sum(r.within is not None for r in rows)
    rule = "-" * max(len(t) for t in text)
    return "\n".join([text[0], rule, *text[1:], rule, f"{compared - out} of {compared} compared rows within tolerance"])


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    body = ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in (HEADER, *cells(rows))]
    body.insert(1, "|" + " --- |" * len(HEADER))
    return "\n".join(body) + "\n"


def comma_separated(rows: Sequence[Row]) -> str:
    """The rows as CSV, numbers in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for r in rows:
        writer.writerow([r.figure, r.quantity, r.published, repr(r.ours), r.tolerance, r.verdict, r.how, r.remark])
    return out.getvalue()
