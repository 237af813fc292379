"""Every evaluation of a study as one table, with where each number comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apportion.core.errors import ApportionError
from apportion.runs.files import CONFIG, read_json, write_atomic
from apportion.study import cells
from apportion.study.budgets import Budget, recorded
from apportion.study.files import TUNING, read_record

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evaluations.parquet"
POINTS = 100
"""Of a curve."""
COLUMNS = {
    "phase": "study or tuning",
    "arm": "the method's label in the study",
    "task": "Gymnasium id, or the name of a language-model task",
    "seed": "of the run",
    "trial": "of tuning, -1 in the study",
    "kind": "training: episodes that ended since the row before, actions sampled (completions of an update, of a "
    "language model); final: the trained policy, most likely actions (answers to the evaluation data); evaluation: as "
    "final, before the end",
    "steps": "environment steps spent (updates made, of a language model)",
    "return_mean": "mean return of the episodes",
    "return_low": "lower edge of its 95% interval (final, control)",
    "return_high": "upper edge of its 95% interval (final, control)",
    "episodes": "how many; completions, of a language model (problems, where it is evaluated)",
    "seconds": "wall-clock of the run so far, compilation included",
    "compile_seconds": "of it, compilation",
    "state": "of the run: done, diverged, failed, running, stopped, waiting",
    "message": "what went wrong, if anything did",
    "sessions": "how often the run was started",
    "method": "every part with its values, as it ran",
    "setup": "everything else that decided the run",
    "commit": "of the code",
    "versions": "of the packages",
    "machine": "class of the machine",
    "completions": "sampled so far, of a language model, as are all below",
    "tokens": "response tokens sampled so far",
    "accuracy": "fraction of answers whose first reward reached 1",
    "accuracy_low": "lower edge of its 95% interval (evaluation, final)",
    "accuracy_high": "upper edge of its 95% interval (evaluation, final)",
    "length_mean": "mean response length in tokens",
    "length_right": "of right answers",
    "length_wrong": "of wrong answers",
}
"""Columns of the table and what they hold."""
_LANGUAGE = tuple(COLUMNS)[tuple(COLUMNS).index("completions") :]
_TEXTS = ("phase", "arm", "task", "kind", "state", "message", "method", "setup", "commit", "versions", "machine")
_KEY = ("phase", "arm", "task", "seed", "trial")
_NONE = {"kind": "none", "steps": 0, "episodes": 0}
"""The row of a run without any evaluation."""


def pandas() -> Any:
    """The pandas module. Raises ApportionError saying how to install it."""
    try:
        import pandas
        import pyarrow  # noqa: F401 (writes and reads the Parquet file)
    except ImportError as error:
        raise ApportionError(f"studies need pandas and pyarrow ({error}): pip install 'apportion[study]'") from None
    return pandas


def load(out: str | os.PathLike[str]) -> pd.DataFrame:
    """The table of the study in a folder as a pandas dataframe, one row an evaluation; see `COLUMNS`.

    Read from the runs while they are there, from evaluations.parquet where only that was kept (see `kept`). A run
    without any evaluation has one row of kind "none". Raises ApportionError for a folder without a study.
    """
    out = Path(out)
    record = read_record(out)
    before = kept(out, record)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    budget = recorded(record)
    for cell in record["cells"]:
        if (old := before.get(cell["folder"])) is not None:
            for name, column in columns.items():
                column += old[name].tolist() if name in old else [None] * len(old)
            continue
        rows = cells.domain(budget[cell["task"]]).evaluations(out / cell["folder"]) or [_NONE]
        shared = _shared(cell, out / cell["folder"])
        for name, column in columns.items():
            column += [shared[name]] * len(rows) if name in shared else [row.get(name) for row in rows]
    table = pandas().DataFrame(columns)
    return table.astype(dict.fromkeys(_TEXTS, "category") | dict.fromkeys(_LANGUAGE, float))


def kept(out: Path, record: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Rows of evaluations.parquet by folder, of the runs that are over and whose folders are not here.

    A study of which only its table was kept, as in a repository, goes on from it. The trials of an arm on a task count
    only all together, and only where tuning.json tells what they chose.
    """
    gone = {_key(c): c for c in record["cells"] if not (out / c["folder"]).exists()}
    if not gone or not (out / TABLE).exists():
        return {}
    table = pandas().read_parquet(out / TABLE)
    runs = table[table["state"].isin(cells.OVER)].groupby(list(_KEY), observed=True)
    found = {gone[key]["folder"]: rows for key, rows in runs if key in gone}
    tuning = read_json(out / TUNING, "what tuning chose")["arms"] if (out / TUNING).exists() else []
    whole = {(one["arm"], one["task"]) for one in tuning}
    trials = [c for c in record["cells"] if c["trial"] is not None]
    whole -= {(c["arm"], c["task"]) for c in trials if c["folder"] not in found}
    lost = {c["folder"] for c in trials if (c["arm"], c["task"]) not in whole}
    return {folder: rows for folder, rows in found.items() if folder not in lost}


def _key(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a cell's rows in the table from others."""
    return tuple(_identity(cell)[name] for name in _KEY)


def save(table: pd.DataFrame, out: Path) -> None:
    """Write the table as evaluations.parquet."""
    import io

    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_atomic(out / TABLE, buffer.getvalue())


def _identity(cell: Mapping[str, Any]) -> dict[str, Any]:
    trial = {"phase": "study", "trial": -1} if cell["trial"] is None else {"phase": "tuning", "trial": cell["trial"]}
    return {name: cell[name] for name in ("arm", "task", "seed")} | trial


def _shared(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What all rows of a cell have in common."""
    found = cells.state(folder)
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    method = "; ".join(f"{name} = {value}" for name, value in config.get("method", {}).items())
    setup = {name: config[name] for name in ("overrides", "setup", "steps") if name in config}
    return _identity(cell) | {
        "state": found.get("state", "waiting"),
        "message": found.get("message", ""),
        "sessions": found.get("sessions", 0),
        "method": method,
        "setup": json.dumps(setup),
        "commit": found.get("commit", ""),
        "versions": ", ".join(f"{k} {v}" for k, v in config.get("versions", {}).items()),
        "machine": found.get("machine", ""),
    }


def grid(budget: int) -> np.ndarray:
    """Amounts of budget spent [POINTS] at which curves are compared."""
    return np.linspace(0, budget, POINTS + 1)[1:]


def on_grid(steps: np.ndarray, values: np.ndarray, budget: int, after: float | None = None) -> np.ndarray:
    """The curve (steps [K], values [K]) at the grid's points, straight between them.

    after: the value past the last step, for a run that ended early; None holds the last one.
    """
    x = grid(budget)
    y = np.interp(x, steps, values)
    return y if after is None else np.where(x > steps[-1], after, y)


def measured(kinds: Iterable[str], accuracies: Iterable[float | None]) -> str:
    """The column that a task's scores and curves are of, from those two columns: the accuracy of a language model that
    has evaluation data, else the return."""
    judged = any(k != "training" and a is not None and a == a for k, a in zip(kinds, accuracies, strict=True))
    return "accuracy" if judged else "return_mean"


def area(folder: Path, budget: Budget) -> float:
    """Mean height of the training curve over the budget of the run in a folder; -inf if it diverged."""
    rows = cells.domain(budget).evaluations(folder)
    column = measured([r["kind"] for r in rows], [r.get("accuracy") for r in rows])
    rows = [r for r in rows if r["kind"] == "training"]
    if not rows or cells.state(folder).get("state") == "diverged":
        return -np.inf
    steps, values = (np.array([r[name] for r in rows], float) for name in (budget.unit, column))
    return float(on_grid(steps, values, budget.amount).mean())
