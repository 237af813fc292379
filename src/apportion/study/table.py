"""Every evaluation of a study as one table, with where each number comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from apportion.core.errors import ApportionError
from apportion.runs.files import CONFIG, write_atomic
from apportion.study import cells
from apportion.study.files import read_record

if TYPE_CHECKING:
    import pandas as pd

TABLE = "evaluations.parquet"
POINTS = 100
"""Of a curve."""
COLUMNS = {
    "phase": "study or tuning",
    "arm": "the method's label in the study",
    "task": "Gymnasium id",
    "seed": "of the run",
    "trial": "of tuning, -1 in the study",
    "kind": "training: episodes that ended since the row before, actions sampled; final: the trained policy, most "
    "likely actions",
    "steps": "environment steps spent",
    "return_mean": "mean return of the episodes",
    "return_low": "lower edge of its 95% interval (final)",
    "return_high": "upper edge of its 95% interval (final)",
    "episodes": "how many",
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
}
"""Columns of the table and what they hold."""
CLOCK = ("seconds", "compile_seconds")
_TEXTS = ("phase", "arm", "task", "kind", "state", "message", "method", "setup", "commit", "versions", "machine")


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

    Read from the runs while they are there, from evaluations.parquet where only that was kept. A run without any
    evaluation has one row of kind "none". Raises ApportionError for a folder without a study.
    """
    out = Path(out)
    record = read_record(out)
    if not (out / "cells").exists() and (out / TABLE).exists():
        return pandas().read_parquet(out / TABLE)
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for cell in record["cells"]:
        rows = _rows(out / cell["folder"])
        shared = _shared(cell, out / cell["folder"])
        for name, column in columns.items():
            column += [shared[name]] * len(rows) if name in shared else [row[name] for row in rows]
    table = pandas().DataFrame(columns)
    return table.astype(dict.fromkeys(_TEXTS, "category"))


def save(table: pd.DataFrame, out: Path) -> None:
    """Write the table as evaluations.parquet."""
    import io

    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    write_atomic(out / TABLE, buffer.getvalue())


def _shared(cell: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What all rows of a cell have in common."""
    found = cells.state(folder)
    config = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    method = "; ".join(f"{name} = {value}" for name, value in config.get("method", {}).items())
    setup = {name: config[name] for name in ("overrides", "setup", "steps") if name in config}
    return {
        "phase": "study" if cell["trial"] is None else "tuning",
        "arm": cell["arm"],
        "task": cell["task"],
        "seed": cell["seed"],
        "trial": -1 if cell["trial"] is None else cell["trial"],
        "state": found.get("state", "waiting"),
        "message": found.get("message", ""),
        "sessions": found.get("sessions", 0),
        "method": method,
        "setup": json.dumps(setup),
        "commit": found.get("commit", ""),
        "versions": ", ".join(f"{k} {v}" for k, v in config.get("versions", {}).items()),
        "machine": found.get("machine", ""),
    }


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of one run."""
    none = {"return_low": None, "return_high": None}
    out = [
        none
        | {"kind": "training", "steps": r["env_steps"], "return_mean": r["return_mean"]}
        | {name: r[name] for name in ("episodes", "seconds", "compile_seconds")}
        for r in cells.rows(folder)
        if r["return_mean"] is not None
    ]
    if (end := cells.summary(folder)) is not None:
        low, high = end["return_ci"]
        out.append(
            {"kind": "final", "steps": end["env_steps"], "return_mean": end["return_mean"], "return_low": low}
            | {"return_high": high, "episodes": end["episodes"]}
            | {"seconds": end["wall_seconds"], "compile_seconds": end["compile_seconds"]}
        )
    return out or [none | {"kind": "none", "steps": 0, "return_mean": None, "episodes": 0} | dict.fromkeys(CLOCK)]


def grid(budget: int) -> np.ndarray:
    """Steps [POINTS] at which curves are compared."""
    return np.linspace(0, budget, POINTS + 1)[1:]


def on_grid(steps: np.ndarray, values: np.ndarray, budget: int, after: float | None = None) -> np.ndarray:
    """The curve (steps [K], values [K]) at the grid's points, straight between them.

    after: the value past the last step, for a run that ended early; None holds the last one.
    """
    x = grid(budget)
    y = np.interp(x, steps, values)
    return y if after is None else np.where(x > steps[-1], after, y)


def area(folder: Path, budget: int) -> float:
    """Mean training return over the budget of the run in a folder: the area under its curve; -inf if it diverged."""
    rows = [r for r in cells.rows(folder) if r["return_mean"] is not None]
    if not rows or cells.state(folder).get("state") == "diverged":
        return -np.inf
    steps, values = (np.array([r[k] for r in rows], float) for k in ("env_steps", "return_mean"))
    return float(on_grid(steps, values, budget).mean())
