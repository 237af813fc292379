"""From the table of evaluations to the numbers of a report: scores, curves, comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from apportion.study import statistics as st
from apportion.study.table import grid, on_grid

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str]
"""(arm, task)."""
BOUNDS = {"CartPole-v1": (0.0, 500.0), "Acrobot-v1": (-500.0, 0.0), "MountainCar-v0": (-200.0, 0.0)}
"""The lowest and highest return that a task's own rules allow."""
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

    seeds, scores, whole: by (arm, task), [runs]; whole is a run's seconds. curves, seconds: by (arm, task),
    [runs, POINTS], the training return and the seconds without compilation at `grid(budget)`. bounds: by task.
    states: by (arm, task), how many runs are in which state.
    """

    record: Mapping[str, Any]
    seeds: dict[Key, np.ndarray]
    scores: dict[Key, np.ndarray]
    curves: dict[Key, np.ndarray]
    seconds: dict[Key, np.ndarray]
    whole: dict[Key, np.ndarray]
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

    def threshold(self, task: str) -> float:
        """The return whose first crossing is timed."""
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
        """An arm on a task in the task's own units: IQM and mean of the score, area under the curve, and steps to the
        threshold (median over runs, infinite if half never got there; and how many of the runs did)."""
        score, curve = self.scores[arm, task], self.curves[arm, task]
        x = grid(self.record["steps"][task])
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
    tail = record["evaluation"]["score"] == "last_tenth"
    raw = {key: _score(run, record["steps"][key[1]], tail) for key, run in runs.items()}
    bounds = _bounds(raw, record)
    seeds: dict[Key, list[int]] = {}
    scores: dict[Key, list[float]] = {}
    curves: dict[Key, list[np.ndarray]] = {}
    seconds: dict[Key, list[np.ndarray]] = {}
    whole: dict[Key, list[float]] = {}
    for (arm, task, seed), run in runs.items():
        low, budget = bounds[task][0], record["steps"][task]
        score = raw[arm, task, seed]
        seeds.setdefault((arm, task), []).append(seed)
        scores.setdefault((arm, task), []).append(low if np.isnan(score) else score)
        curve, clock = _curve(run, budget, low)
        curves.setdefault((arm, task), []).append(curve)
        seconds.setdefault((arm, task), []).append(clock)
        whole.setdefault((arm, task), []).append(run["seconds"].max())

    def stack(by: dict[Key, list[Any]]) -> dict[Key, np.ndarray]:
        return {key: np.array(x) for key, x in by.items()}

    return Results(record, stack(seeds), stack(scores), stack(curves), stack(seconds), stack(whole), bounds, states)


def _states(table: pd.DataFrame) -> dict[Key, dict[str, int]]:
    """How many runs of each (arm, task) are in which state."""
    each = table.drop_duplicates(["arm", "task", "seed"])
    out: dict[Key, dict[str, int]] = {}
    for (arm, task, state), n in each.groupby(["arm", "task", "state"], observed=True).size().items():
        out.setdefault((arm, task), {})[state] = int(n)
    return out


def _score(run: pd.DataFrame, budget: int, tail: bool) -> float:
    """The run's score; nan if it diverged."""
    if run["state"].iloc[0] == "diverged":
        return np.nan
    if not tail:
        return float(run.loc[run["kind"] == "final", "return_mean"].iloc[0])
    rows = run[run["kind"] == "training"]
    last = rows[rows["steps"] > 0.9 * budget] if (rows["steps"] > 0.9 * budget).any() else rows.tail(1)
    return float(np.average(last["return_mean"], weights=last["episodes"])) if len(last) else np.nan


def _bounds(raw: dict[Any, float], record: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The returns that count as 0 and 1: given, the task's own, or else the lowest and highest score found."""
    out = dict(BOUNDS) | {task: (low, high) for task, (low, high) in record["evaluation"]["bounds"].items()}
    for task in record["tasks"]:
        found = [x for (_, t, _), x in raw.items() if t == task and np.isfinite(x)] or [1.0]
        out.setdefault(task, (min(found), max(found)) if min(found) < max(found) else (min(found) - 1.0, min(found)))
    return {task: out[task] for task in record["tasks"]}


def _curve(run: pd.DataFrame, budget: int, low: float) -> tuple[np.ndarray, np.ndarray]:
    """Training return and seconds at the grid's points [POINTS].

    Past a divergence, and where no episode ever ended, the return is the lower bound.
    """
    rows = run[run["kind"] == "training"]
    if not len(rows):
        return np.full(len(grid(budget)), low), np.zeros(len(grid(budget)))
    steps, diverged = rows["steps"].to_numpy(float), run["state"].iloc[0] == "diverged"
    curve = on_grid(steps, rows["return_mean"].to_numpy(float), budget, low if diverged else None)
    return curve, on_grid(steps, (rows["seconds"] - rows["compile_seconds"]).to_numpy(float), budget)
