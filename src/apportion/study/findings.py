"""A study's report as a list of tables, figures and texts, before anybody decides how they look."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from apportion.study import statistics as st
from apportion.study.budgets import LANGUAGE, UNITS, Budget, total
from apportion.study.estimate import duration
from apportion.study.report import Chart, Curve
from apportion.study.results import Results
from apportion.study.table import grid

if TYPE_CHECKING:
    import pandas as pd

EDGES = ("95% from", "to")
BAND = "Line: mean of the runs; band: 95% bootstrap interval of it."
NAMES = {"return_mean": "return", "accuracy": "accuracy"}
"""What is measured, in words."""
BESIDE = {
    "evaluated": ("return of evaluations", "Whole episodes, most likely actions.", "return"),
    "accuracy": ("accuracy on the evaluation data", "Straight between two evaluations.", "accuracy"),
    "length_right": ("length of right answers", "Completions sampled for training whose first reward is 1.", "tokens"),
    "length_wrong": (
        "length of wrong answers",
        "Completions sampled for training whose first reward is less.",
        "tokens",
    ),
}
"""Title, what is drawn and unit of the curves in `results.FURTHER`."""
LEVELS = np.linspace(0, 1, 101)
"""Normalised scores at which a performance profile is drawn."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. note: what the numbers are. swatches: rows in the order of the curves' colours."""

    id: str
    title: str
    note: str
    header: list[str]
    rows: list[list[str]]
    swatches: bool = False


@dataclass(frozen=True)
class Text:
    """Paragraphs that keep their line breaks; folded: by a heading each, (heading, text)."""

    id: str
    title: str
    note: str
    folded: list[tuple[str, str]]


Part = Table | Chart | Text


def interval(e: st.Estimate) -> str:
    """The number with its interval, three digits each, or all those before the point.

    >>> interval(st.Estimate(0.51234, 0.25, 1234.5))
    '0.512 [0.25, 1234]'
    """
    value, low, high = (f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in e)
    return f"{value} [{low}, {high}]"


def parts(
    found: Results, table: pd.DataFrame, methods: Mapping[str, Any], tuning: Mapping[str, Any] | None
) -> list[Part]:
    """Everything that a report shows, in order. methods, tuning: what methods.json and tuning.json hold."""
    out: list[Part] = [headline(found), *(of_task(found, t) for t in found.tasks)]
    out += [curves(found, t) for t in found.tasks] + ([profiles(found)] if found.arms else [])
    out += [chart for t in found.tasks for chart in beside(found, t)] + [clocks(found, t) for t in found.tasks]
    out += [matrix(found), paired(found)] if len(found.arms) > 1 else []
    out += [paired_by_task(found)] if len(found.tasks) > 1 else []
    out += [tuned(found, tuning)] if tuning is not None else []
    return [*out, cards(methods), provenance(table)]


def headline(found: Results) -> Table:
    """One row a method: all tasks together."""
    rows = []
    for arm in found.record["arms"]:
        states = [found.states.get((arm, t), {}) for t in found.record["tasks"]]
        counts = [str(sum(s.get(name, 0) for s in states)) for name in ("done", "diverged", "failed")]
        all_ = found.aggregate(arm) if arm in found.arms else None
        numbers = [interval(all_[name]) for name in ("iqm", "median", "mean")] if all_ else ["not on every task"] * 3
        rows.append([arm, *numbers, *counts])
    bounds = "; ".join("{} {:.4g} to {:.4g}".format(t, *found.bounds[t]) for t in found.tasks)
    single = " (of a single run, it three times)" if any(len(x) == 1 for x in found.scores.values()) else ""
    note = (
        f"{_score(found)} Scores are scaled per task so that these count as 0 and 1: {bounds}. IQM: mean of "
        "the middle half of all runs; median: of the task means; in brackets, 95% intervals of 2,000 bootstrap samples "
        f"that redraw runs within each task{single}. A diverged run counts as 0; a failed one is left out and counted."
    )
    header = ["method", "IQM", "median", "mean", "runs done", "diverged", "failed"]
    return Table("results", "All tasks together", note, header, rows, swatches=True)


def _score(found: Results) -> str:
    e, kinds = found.record["evaluation"], {(found.budget(t).unit in LANGUAGE, found.measures[t]) for t in found.tasks}
    judged, unjudged = (True, "accuracy") in kinds, (True, "return_mean") in kinds
    if e["score"] == "last_tenth":
        score = "the training episodes that ended in the last tenth of its budget"
        completions = "; of a language model, of the completions sampled then" if judged or unjudged else ""
        accuracy = " (their accuracy, where there is evaluation data)" if judged else ""
        return f"A run's score is the mean return of {score}{completions}{accuracy}."
    told = []
    if any(not language for language, _ in kinds):
        told.append(f"the mean return of {e['episodes']} episodes of its final policy, most likely actions")
    if judged:
        told.append("the accuracy of the trained language model on its evaluation data")
    if unjudged:
        told.append("the mean reward of what a language model without evaluation data sampled in its last tenth")
    return f"A run's score is {'; or '.join(told)}." if told else ""


def of_task(found: Results, task: str) -> Table:
    """One row a method: one task, in its own units."""
    rows = []
    for arm in [a for a in found.record["arms"] if (a, task) in found.scores]:
        x = found.on_task(arm, task)
        first = x["steps_to_threshold"]
        steps = f">{found.budget(task).amount:,}" if math.isinf(first) else f"{first:,.0f}"
        numbers = [interval(x[name]) for name in ("iqm", "mean", "area")]
        rows.append(
            [arm, *numbers, steps, f"{x['reached']} of {x['runs']}", str(x["diverged"]), duration(x["seconds"])]
        )
    unit, name = found.budget(task).unit, NAMES[found.measures[task]]
    note = (
        f"{found.budget(task)} a run. Area: mean training {name} over the budget. {unit.capitalize()} "
        f"to {found.threshold(task):.4g}: median over all runs of the first crossing of the training {name}; one that "
        "never crosses counts as later than any other (> where half never do)."
    )
    header = ["method", "IQM", "mean", "area", f"{unit} to threshold", "reached it", "diverged", "time a run"]
    return Table(f"task-{task}", task, note, header, rows, swatches=len(rows) == len(found.record["arms"]))


def _band(runs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of curves [runs, K] with the 95% bootstrap interval of it."""
    drawn = np.random.default_rng(0).integers(len(runs), size=(500, len(runs)))
    weight = np.stack([np.bincount(d, minlength=len(runs)) for d in drawn]) / len(runs)
    low, high = np.percentile(weight @ runs, [2.5, 97.5], axis=0)
    return runs.mean(axis=0), low, high


def _curve(found: Results, arm: str, *lines: np.ndarray) -> Curve:
    x, mean, low, high = ([float(f"{v:.5g}") for v in line] for line in lines)
    return Curve(arm, x, mean, low, high, list(found.record["arms"]).index(arm))


def curves(found: Results, task: str) -> Chart:
    """What training measured against the budget spent."""
    budget, name = found.budget(task), NAMES[found.measures[task]]
    drawn = [_curve(found, arm, grid(budget.amount), *_band(found.curves[arm, task])) for arm in _on(found, task)]
    what = "Mean return of the episodes that ended lately, actions sampled."
    if budget.unit in LANGUAGE:
        what = f"Mean {name} of the completions sampled for an update, those that a filter threw away included."
    x = UNITS[budget.unit].words
    return Chart(f"curves-{task}", f"{task}: learning curves", f"{what} {BAND}", x, name, drawn, edges=EDGES)


def beside(found: Results, task: str) -> Iterator[Chart]:
    """What else runs are looked at by: evaluations on the way; of language models also lengths of answers."""
    budget = found.budget(task)
    for name, (title, what, y) in BESIDE.items():
        by = found.further[name]
        lines = [
            _curve(found, arm, grid(budget.amount), *_band(by[arm, task]))
            for arm in _on(found, task)
            if (arm, task) in by
        ]
        if lines:
            id, x = f"{name.replace('_', '-')}-{task}", UNITS[budget.unit].words
            yield Chart(id, f"{task}: {title}", f"{what} {BAND}", x, y, lines, edges=EDGES)


def clocks(found: Results, task: str) -> Chart:
    """What training measured against wall-clock."""
    drawn = [
        _curve(found, arm, found.seconds[arm, task].mean(axis=0), *_band(found.curves[arm, task]))
        for arm in _on(found, task)
    ]
    name = NAMES[found.measures[task]]
    cores = "" if found.budget(task).unit in LANGUAGE else " on one core"
    note = f"As the learning curves, against a run's mean wall-clock{cores} without compilation. {BAND}"
    return Chart(f"clock-{task}", f"{task}: {name} against time", note, "seconds", name, drawn, edges=EDGES)


def _on(found: Results, task: str) -> Iterator[str]:
    return (arm for arm in found.record["arms"] if (arm, task) in found.scores)


def profiles(found: Results) -> Chart:
    """Fraction of runs above each normalised score."""
    drawn = [_curve(found, arm, LEVELS, *st.profile(found.normalised(arm), LEVELS)) for arm in found.arms]
    note = "Fraction of runs whose scaled score is above the level, mean over tasks; band: 95% bootstrap interval."
    title, x = "Performance profiles", "scaled score"
    return Chart("profiles", title, note, x, "fraction of runs above", drawn, top=1.02, edges=EDGES)


def matrix(found: Results) -> Table:
    """Probability that the row's method beats the column's."""
    by = {(p.first, p.second): p.better for p in found.pairs()}
    rows = []
    for a in found.arms:
        cells = []
        for b in found.arms:
            if (a, b) in by:
                cells.append(interval(_short(by[a, b])))
            elif (b, a) in by:
                v = by[b, a]
                cells.append(interval(_short(st.Estimate(1 - v.value, 1 - v.high, 1 - v.low))))
            else:
                cells.append("-")
        rows.append([a, *cells])
    note = (
        "Probability that a run of the row's method scores higher than one of the column's on the same task, mean over "
        "tasks, a tie counting half (Mann and Whitney's U), with 95% bootstrap intervals."
    )
    return Table("matrix", "Who beats whom", note, ["beats", *found.arms], rows)


def _short(e: st.Estimate) -> st.Estimate:
    return st.Estimate(*(round(v, 2) for v in e))


def paired(found: Results) -> Table:
    """Every pair's difference, run by run of the same seed."""
    pairs = found.pairs()
    rows = [
        [f"{p.first} – {p.second}", interval(p.difference), str(p.pairs), f"{p.p:.3g}", f"{p.corrected:.3g}"]
        for p in pairs
    ]
    note = (
        "Difference of the scaled scores, run by run of the same task and seed: mean with 95% bootstrap interval. p: "
        f"sign flips, exact up to 13 pairs; the last column is corrected by Holm for {len(pairs)} pairs. "
        f"{_least(pairs)}"
    )
    return Table("paired", "Paired by seed", note, ["pair", "difference", "pairs", "p", "p (Holm)"], rows)


def paired_by_task(found: Results) -> Table:
    """Every pair's difference on each task."""
    by = {task: found.pairs_on(task) for task in found.tasks}
    pairs = dict.fromkeys(pair for on_task in by.values() for pair in on_task)
    rows = [[f"{a} – {b}", *(interval(by[t][a, b]) if (a, b) in by[t] else "-" for t in found.tasks)] for a, b in pairs]
    note = "Run by run of the same seed, in the task's own units: mean difference with 95% bootstrap interval."
    return Table("paired-by-task", "Paired by seed, task by task", note, ["pair", *found.tasks], rows)


def _least(pairs: Sequence[Any]) -> str:
    n = min((p.pairs for p in pairs), default=0)
    return f"With {n} pair{'s' * (n > 1)} p cannot be smaller than {2 / 2**n:.2g}." if 0 < n <= 13 else ""


def tuned(found: Results, tuning: Mapping[str, Any]) -> Table:
    """What tuning chose, and what it cost."""
    rows, spent = [], []
    for one in tuning["arms"]:
        unit, trials = found.budget(one["task"]).unit, one["trials"]
        settings = ", ".join(f"{k} = {v}" for k, v in trials[one["picked"]]["settings"].items())
        spent.append(Budget(unit, one[unit]))
        rows.append([one["arm"], one["task"], settings, str(len(trials)), str(spent[-1])])
    note = f"Chosen by the {tuning['rule']}, on seeds that are not compared; {total(spent)} in all."
    return Table("tuning", "Tuning", note, ["method", "task", "chosen", "trials", "spent"], rows)


def cards(methods: Mapping[str, Any]) -> Text:
    """Each method's card and exact audit."""
    folded = [(f"{name}: card and audit", f"{m['card']}\n\nExact audit\n{m['audit']}") for name, m in methods.items()]
    note = "As the first task runs them. The audit: expected update against true gradient, on the toy language."
    return Text("methods", "The methods", note, folded)


def provenance(table: pd.DataFrame) -> Table:
    """Where the numbers come from."""
    rows = []
    for name in ("commit", "versions", "machine"):
        rows += [
            [name, f"git {value}" if name == "commit" else value] for value in sorted(table[name].unique()) if value
        ]
    troubles = table[table["message"] != ""].drop_duplicates(["arm", "task", "seed", "trial"])
    rows += [[f"{r.arm}, {r.task}, seed {r.seed}", f"{r.state}: {r.message}"] for r in troubles.itertuples()]
    note = "Every evaluation, with all of this, is in evaluations.parquet; apportion.study.load reads it."
    return Table("provenance", "Where the numbers come from", note, ["what", "value"], rows)
