"""What the demo shows: one table on the terminal, one page in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import numpy as np

from apportion import __version__
from apportion.core.catalogue import METHODS
from apportion.study import family
from apportion.study.demo import CARTPOLE, CONTESTANTS, LANGUAGE, Result
from apportion.study.report import Chart, Curve, page, table

HEADER = (
    "method",
    "CartPole: return",
    "env steps",
    "seconds (compiling)",
    "language: KL to pi*, nats",
    "E[R]",
    "seconds",
)


def interval(x: np.ndarray, low: float, high: float) -> tuple[float, float]:
    """95% interval of the mean by Student's t, cut to what the quantity can be."""
    from scipy.special import stdtrit

    half = float(stdtrit(len(x) - 1, 0.975)) * float(np.std(x, ddof=1)) / len(x) ** 0.5 if len(x) > 1 else np.inf
    return max(low, float(x.mean()) - half), min(high, float(x.mean()) + half)


def rows(results: Sequence[Result]) -> list[list[str]]:
    """The table's rows, one a method."""
    by = {(r.task, r.label): r for r in results}
    out = []
    for who in CONTESTANTS:
        control, language = by[CARTPOLE, who.label], by[LANGUAGE, who.label]
        score, kl = control.score["return"], language.score["kl_to_optimum"]
        (a, b), (c, d) = interval(score, 0.0, 500.0), interval(kl, 0.0, np.inf)
        out.append(
            [
                who.label,
                f"{score.mean():.0f} [{a:.0f}, {b:.0f}]",
                f"{control.env_steps:,}",
                f"{control.wall_seconds:.1f} ({control.compile_seconds:.1f})",
                f"{kl.mean():.2g} [{c:.2g}, {d:.2g}]",
                f"{language.score['expected_reward'].mean():.3f}",
                f"{language.wall_seconds:.1f}",
            ]
        )
    return out


def show(results: Sequence[Result], seeds: int) -> None:
    """Print the table; on a narrow terminal an interval goes below its mean."""
    from textwrap import fill

    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, 80 if console.is_terminal else 112)
    narrow = console.width < 96
    mark = "\n[" if narrow else " ["
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0 if narrow else (0, 1))
    out.title = f"CartPole-v1 and the toy language: mean of {seeds} seeds [95% interval]"
    for i, name in enumerate(HEADER):
        out.add_column(fill(name, 14), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows(results):
        out.add_row(*(cell.replace(" [", mark) for cell in row))
    console.print(out)


def _chart(results: Sequence[Result], task: str, name: str, **about: object) -> Chart:
    curves = []
    for r in (r for r in results if r.task == task):
        y = r.curves[name]
        lines = (r.x, y.mean(axis=0), y.min(axis=0), y.max(axis=0))
        x, mean, low, high = ([float(f"{v:.5g}") for v in line] for line in lines)
        curves.append(Curve(r.label, x, mean, low, high))
    return Chart(id=name, curves=curves, **about)  # type: ignore[arg-type]


def charts(results: Sequence[Result]) -> list[Chart]:
    """The learning curves."""
    band = "Line: mean of the seeds; band: lowest to highest seed."
    return [
        _chart(
            results,
            CARTPOLE,
            "return",
            title="CartPole-v1: return while training",
            note=f"Mean return of the episodes that ended lately, actions sampled; 500 is the most. {band}",
            x_title="environment steps",
            y_title="return",
            top=520.0,
        ),
        _chart(
            results,
            LANGUAGE,
            "kl_to_optimum",
            title="Toy language: exact distance to the optimum",
            note=f"KL(pi || pi*) in nats per response, mean over prompts, computed by enumeration. {band}",
            x_title="updates",
            y_title="KL to pi*",
            log=True,
        ),
        _chart(
            results,
            LANGUAGE,
            "expected_reward",
            title="Toy language: exact expected reward",
            note=f"pi* itself earns less than the most possible: it also stays near the reference. {band}",
            x_title="updates",
            y_title="expected reward",
        ),
    ]


INTRO = """
<p>Five methods, each one declaration of a sampler and a weight, trained from the same seeds on two tasks: CartPole-v1
(whole episodes or a stream, in one compiled program) and a language of 625 responses on which everything can be
computed exactly.</p>
<p>On the language all but GRPO have the penalty to the reference in the reward, so that following their expected
update ends at pi*, the optimum of E[R] &minus; 0.5 KL. GRPO runs as published, with the k3 estimator in the loss: it
ends elsewhere, and no amount of training brings it to pi*. On CartPole there is no reference and no penalty.</p>
"""


def demo_page(results: Sequence[Result], seeds: Sequence[int], seconds: float) -> str:
    """The report as one HTML page."""
    drawn = charts(results)
    note = (
        f"Mean of {len(seeds)} seeds [95% interval]. CartPole: 20 episodes of each final policy, most likely actions. "
        "Seconds: all seeds together, on one core."
    )
    people = [list(family.row(m).values()) for m in METHODS.values()]
    columns = list(family.row(next(iter(METHODS.values()))))
    body = [
        INTRO,
        '<section aria-labelledby="results"><h2 id="results">Results</h2>',
        f'<p class="note">{note}</p>',
        table(HEADER, rows(results), "Results", swatches=True),
        "</section>",
        *(chart.html() for chart in drawn),
        '<section aria-labelledby="family"><h2 id="family">The family</h2>',
        '<p class="note">Read off the parts of every method in the catalogue.</p>',
        table(columns, people, "The family of methods", kind="family"),
        "</section>",
    ]
    drawn_from = f"seeds {', '.join(map(str, seeds))}"
    footer = f"apportion {__version__}, {date.today().isoformat()}; {seconds:.0f} seconds, {drawn_from}."
    return page("Five methods, two tasks", "\n".join(body), drawn, footer)
