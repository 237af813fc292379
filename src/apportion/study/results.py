"""From the table of evaluations to the numbers of a report: scores, curves, comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from apportion.study import statistics as st
from apportion.study.budgets import Budget, recorded
from apportion.study.table import grid, measured, on_grid

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str]
"""(arm, task)."""
BOUNDS = {"CartPole-v1": (0.0, 500.0), "Acrobot-v1": (-500.0, 0.0), "MountainCar-v0": (-200.0, 0.0)}
"""The lowest and highest return that a task's own rules allow."""
EVALUATED = ("evaluation", "final")
FURTHER = {
    "evaluated": (EVALUATED, "return_mean"),
    "accuracy": (EVALUATED, "accuracy"),
    "length_right": (("training",), "length_right"),
    "length_wrong": (("training",), "length_wrong"),
}
"""Curves beside that of training: kinds of rows, and column."""
NEAR_TOP = 0.9
"""Where no threshold is given: the fraction of the way from the lower to the higher bound."""


class Pair(NamedTuple):
    """Two arms compared. better: P(a run of `first` beats one of `second`). difference: mean of the paired normalised
    scores. p: by sign flips, and after Holm's correction for all pairs. pairs: how many runs were paired by seed."""

    first: str
    second: str
    better: st.Estimate
    difference: st.Estimate
    p: float
    corrected: float
    pairs: int


@dataclass(frozen=True)
class Results:
    """What a study found. Runs that failed or have not ended are left out and counted; diverged ones are counted as
    the lower bound of their task, in scores and in curves from there on.

    measures: by task, the column that scores and curves are of: "return_mean", or "accuracy". seeds, scores, whole: by
    (arm, task), [runs]; whole is a run's seconds. curves, seconds: by (arm, task), [runs, POINTS], what was measured in
    training and the seconds without compilation at `grid(budget)`. further: by name in `FURTHER`, the same of what
    runs are looked at beside; those that never had it are left out. bounds: by task. states: by (arm, task),
    how many runs are in which state.
    """

    record: Mapping[str, Any]
    measures: dict[str, str]
    seeds: dict[Key, np.ndarray]
    scores: dict[Key, np.ndarray]
    curves: dict[Key, np.ndarray]
    seconds: dict[Key, np.ndarray]
    whole: dict[Key, np.ndarray]
    further: dict[str, dict[Key, np.ndarray]]
    bounds: dict[str, tuple[float, float]]
    states: dict[Key, dict[str, int]]

    @property
    def arms(self) -> list[str]:
        """Labels, in the file's order, of the arms that have ended runs on every task: those that can be compared."""
        return [a for a in self.record["arms"] if all((a, t) in self.scores for t in self.tasks)]

    @property
    def tasks(self) -> list[str]:
        """Tasks on which at least one run has ended."""
        found = {task for _, task in self.scores}
        return [t for t in self.record["tasks"] if t in found]

    def budget(self, task: str) -> Budget:
        """What each run of a task may spend."""
        return recorded(self.record)[task]

    def threshold(self, task: str) -> float:
        """The score whose first crossing is timed."""
        low, high = self.bounds[task]
        return float(self.record["evaluation"]["thresholds"].get(task, low + NEAR_TOP * (high - low)))

    def normalised(self, arm: str) -> list[np.ndarray]:
        """Scores of an arm between its tasks' bounds, one array [runs] a task."""
        return [self._unit(self.scores[arm, t], t) for t in self.tasks]

    def _unit(self, x: np.ndarray, task: str) -> np.ndarray:
        low, high = self.bounds[task]
        return (x - low) / (high - low)

    def aggregate(self, arm: str) -> dict[str, st.Estimate]:
        """IQM, median and mean of an arm's normalised scores over all tasks."""
        scores = self.normalised(arm)
        return {f.__name__: st.estimate(f, scores) for f in (st.iqm, st.median, st.mean)}

    def on_task(self, arm: str, task: str) -> dict[str, Any]:
        """An arm on a task in the task's own units: IQM and mean of the score, area under the curve, and steps (or
        completions, or tokens) to the threshold (median over runs, infinite if half never got there; and how many of
        the runs did)."""
        score, curve = self.scores[arm, task], self.curves[arm, task]
        x = grid(self.budget(task).amount)
        first = np.array([st.reached(x, c, self.threshold(task)) for c in curve])
        return {
            "iqm": st.estimate(st.iqm, [score]),
            "mean": st.estimate(st.mean, [score]),
            "area": st.estimate(st.mean, [curve.mean(axis=1)]),
            "steps_to_threshold": st.middle(first),
            "reached": int(np.isfinite(first).sum()),
            "runs": len(score),
            "diverged": self.states[arm, task].get("diverged", 0),
            "seconds": float(self.whole[arm, task].mean()),
        }

    def pairs(self) -> list[Pair]:
        """Every two arms compared on all tasks."""
        found = []
        for a, b in itertools.combinations(self.arms, 2):
            apart = [self._paired(a, b, t) for t in self.tasks]
            together = np.concatenate(apart)
            better = st.improvement(self.normalised(a), self.normalised(b))
            whole = [d for d in apart if len(d)]
            difference = st.estimate(st.mean, whole) if whole else st.Estimate(np.nan, np.nan, np.nan)
            found.append((a, b, better, difference, st.paired_p(together) if whole else 1.0, len(together)))
        corrected = st.holm([p for *_, p, _ in found])
        return [Pair(a, b, x, d, p, c, n) for (a, b, x, d, p, n), c in zip(found, corrected, strict=True)]

    def pairs_on(self, task: str) -> dict[tuple[str, str], st.Estimate]:
        """Every two arms with runs on a task: mean difference of runs with the same seed, in the task's own units."""
        low, high = self.bounds[task]
        found = {}
        for a, b in itertools.combinations([a for a in self.record["arms"] if (a, task) in self.scores], 2):
            if len(apart := self._paired(a, b, task)):
                found[a, b] = st.estimate(st.mean, [apart * (high - low)])
        return found

    def _paired(self, a: str, b: str, task: str) -> np.ndarray:
        """Differences of the normalised scores of runs with the same seed."""
        _, i, j = np.intersect1d(self.seeds[a, task], self.seeds[b, task], return_indices=True)
        return self._unit(self.scores[a, task], task)[i] - self._unit(self.scores[b, task], task)[j]


def results(table: pd.DataFrame, record: Mapping[str, Any]) -> Results:
    """The results of a study from its table and its record."""
    table = table[table["phase"] == "study"]
    states = _states(table)
    ended = table[table["state"].isin(["done", "diverged"])]
    runs = dict(list(ended.groupby(["arm", "task", "seed"], observed=True)))
    budget, tail = recorded(record), record["evaluation"]["score"] == "last_tenth"
    measures = {t: _measure(table[table["task"] == t]) for t in record["tasks"]}
    raw = {key: _score(run, budget[key[1]], measures[key[1]], tail) for key, run in runs.items()}
    bounds = _bounds(raw, record, measures)
    seeds: dict[Key, list[int]] = {}
    scores: dict[Key, list[float]] = {}
    curves: dict[Key, list[np.ndarray]] = {}
    seconds: dict[Key, list[np.ndarray]] = {}
    whole: dict[Key, list[float]] = {}
    further: dict[str, dict[Key, list[np.ndarray]]] = {name: {} for name in FURTHER}
    for (arm, task, seed), run in runs.items():
        low, score = bounds[task][0], raw[arm, task, seed]
        seeds.setdefault((arm, task), []).append(seed)
        scores.setdefault((arm, task), []).append(low if np.isnan(score) else score)
        curve, clock = _curve(run, budget[task], measures[task], low)
        curves.setdefault((arm, task), []).append(curve)
        seconds.setdefault((arm, task), []).append(clock)
        whole.setdefault((arm, task), []).append(run["seconds"].max())
        for name, (kinds, column) in FURTHER.items():
            if name == "evaluated" and measures[task] == "accuracy":
                continue
            if (line := _line(run, budget[task], kinds, column)) is not None:
                further[name].setdefault((arm, task), []).append(line)

    def stack(by: dict[Key, list[Any]]) -> dict[Key, np.ndarray]:
        return {key: np.array(x) for key, x in by.items()}

    beside = {name: stack(by) for name, by in further.items()}
    return Results(
        record,
        measures,
        stack(seeds),
        stack(scores),
        stack(curves),
        stack(seconds),
        stack(whole),
        beside,
        bounds,
        states,
    )


def _measure(table: pd.DataFrame) -> str:
    """What a task is scored by; tables of before there were language models lack the column."""
    return measured(table["kind"], table["accuracy"]) if "accuracy" in table else "return_mean"


def _states(table: pd.DataFrame) -> dict[Key, dict[str, int]]:
    """How many runs of each (arm, task) are in which state."""
    each = table.drop_duplicates(["arm", "task", "seed"])
    out: dict[Key, dict[str, int]] = {}
    for (arm, task, state), n in each.groupby(["arm", "task", "state"], observed=True).size().items():
        out.setdefault((arm, task), {})[state] = int(n)
    return out


def _score(run: pd.DataFrame, budget: Budget, measure: str, tail: bool) -> float:
    """The run's score; nan if it diverged."""
    if run["state"].iloc[0] == "diverged":
        return np.nan
    final = run.loc[run["kind"] == "final", measure]
    if not tail and len(final):
        return float(final.iloc[0])
    rows = run[run["kind"] == "training"]
    late = rows[budget.unit] > 0.9 * budget.amount
    last = rows[late] if late.any() else rows.tail(1)
    return float(np.average(last[measure], weights=last["episodes"])) if len(last) else np.nan


def _bounds(
    raw: dict[Any, float], record: Mapping[str, Any], measures: Mapping[str, str]
) -> dict[str, tuple[float, float]]:
    """The scores that count as 0 and 1: given, the task's own, or else the lowest and highest that were found."""
    out = BOUNDS | {task: (0.0, 1.0) for task, measure in measures.items() if measure == "accuracy"}
    out |= {task: (low, high) for task, (low, high) in record["evaluation"]["bounds"].items()}
    for task in record["tasks"]:
        found = [x for (_, t, _), x in raw.items() if t == task and np.isfinite(x)] or [1.0]
        out.setdefault(task, (min(found), max(found)) if min(found) < max(found) else (min(found) - 1.0, min(found)))
    return {task: out[task] for task in record["tasks"]}


def _curve(run: pd.DataFrame, budget: Budget, measure: str, low: float) -> tuple[np.ndarray, np.ndarray]:
    """What training measured, and seconds, at the grid's points [POINTS].

    Past a divergence, and where no episode ever ended, the measure is at the lower bound.
    """
    rows = run[run["kind"] == "training"]
    if not len(rows):
        return np.full(len(grid(budget.amount)), low), np.zeros(len(grid(budget.amount)))
    spent, diverged = rows[budget.unit].to_numpy(float), run["state"].iloc[0] == "diverged"
    curve = on_grid(spent, rows[measure].to_numpy(float), budget.amount, low if diverged else None)
    return curve, on_grid(spent, (rows["seconds"] - rows["compile_seconds"]).to_numpy(float), budget.amount)


def _line(run: pd.DataFrame, budget: Budget, kinds: tuple[str, ...], column: str) -> np.ndarray | None:
    """A column of a run's rows of these kinds at the grid's points [POINTS]; None where there is no number in it, or
    only that of the end."""
    if column not in run or not (run["kind"] == kinds[0]).any():
        return None
    rows = run[run["kind"].isin(kinds)].dropna(subset=[column])
    if not len(rows):
        return None
    return on_grid(rows[budget.unit].to_numpy(float), rows[column].to_numpy(float), budget.amount)
