"""A cell on a language-model task: checked, run, and its log read as evaluations. Torch is loaded only here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from apportion.core.errors import ApportionError
from apportion.study import logs
from apportion.study.budgets import UNITS

if TYPE_CHECKING:
    from apportion.core.method import Method
    from apportion.lm.setup import Resolved
    from apportion.study.design import Cell

LENGTHS = ("length_mean", "length_right", "length_wrong")
LOG_BYTES = 500_000
"""The logs, samples, configuration and tokenizer of a run, about."""
_sizes: dict[str, int] = {}
"""Bytes of the weights, by setup and use of a reference: a model is loaded once to check a study, not once an arm."""


class _Asked(NamedTuple):
    """The arguments of `lm.train` that a cell stands for. overrides: of the method. settings: of the setup."""

    preset: str | None
    overrides: list[tuple[str, Any]]
    settings: dict[str, Any]


def _asked(cell: Cell) -> _Asked:
    """Changes whose path begins with "setup." are the setup's, as in control; the budget is the study's alone."""
    own: Mapping[str, Any] = cell.lm or {}
    settings = {name: given for name, given in own.items() if name != "preset"}
    overrides = []
    for path, value in cell.settings:
        where, _, field = path.partition(".")
        if where == "setup":
            if field in UNITS:
                raise ApportionError(f"{path} is {value!r}; the budget is the study's, the same for every arm")
            settings[field] = value
        else:
            overrides.append((path, value))
    settings |= {"steps": None, cell.budget.unit: cell.budget.amount}  # in place of a preset's
    return _Asked(own.get("preset"), overrides, settings)


def _needs_lm(cell: Cell) -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ApportionError(
                f"{cell.task} is a language-model task, which needs {package}: pip install 'apportion[lm]'"
            )


def _resolved(cell: Cell) -> Resolved:
    from apportion.lm.setup import resolve

    asked = _asked(cell)
    return resolve(cell.method, asked.settings, asked.overrides, asked.preset)


def check(cell: Cell) -> None:
    """Raises ApportionError for what the task cannot run."""
    _needs_lm(cell)
    _weights(cell)


def _weights(cell: Cell) -> int:
    """Bytes of the model's weights. Raises as `job.prepare`, which tries all that arms can differ in."""
    from apportion.core.weigh import needs
    from apportion.lm.job import prepare, runnable

    chosen, setup = _resolved(cell)
    runnable(chosen)
    key = repr((setup, setup.reference is not None and "logref" in needs(chosen)))
    if key not in _sizes:
        asked = _asked(cell)
        job = prepare(cell.method, asked.settings, asked.overrides, asked.preset, cell.seed)
        _sizes[key] = sum(p.numel() * p.element_size() for p in job.language_model.model.parameters())
    return _sizes[key]


def train(cell: Cell, folder: Path) -> None:
    """The run in its folder, from wherever it stands. Raises as `lm.train`."""
    from apportion.lm.models import use_threads
    from apportion.lm.run import train as run

    use_threads(cell.threads)
    asked = _asked(cell)
    run(
        cell.method,
        preset=asked.preset,
        seed=cell.seed,
        overrides=asked.overrides,
        out=folder,
        resume=True,
        quiet=True,
        **asked.settings,
    )


def method(cell: Cell) -> Method:
    """The method as it runs."""
    return _resolved(cell).method


def disk(cell: Cell) -> int:
    """Bytes of the run's folder at its end: the model, and the logs."""
    return _weights(cell) + LOG_BYTES


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of the run in a folder, as rows of the study's table: what was sampled for each update, and the
    accuracy on the evaluation data before, between and after them."""
    out, before, ended = [], 0, logs.summary(folder) is not None
    rows = logs.rows(folder)
    for row in rows:
        at = {"steps": row["step"], "seconds": row["seconds"], "compile_seconds": 0.0}
        at |= {name: row[name] for name in ("completions", "tokens")}
        if row.get("return_mean") is not None:
            told = {name: row.get(name) for name in ("return_mean", "accuracy", *LENGTHS)}
            out.append({"kind": "training", "episodes": row["completions"] - before} | at | told)
        if "eval_accuracy" in row:
            kind = "final" if ended and row is rows[-1] else "evaluation"
            names = ("return_mean", "accuracy", "accuracy_low", "accuracy_high", *LENGTHS)
            told = {name: row.get(f"eval_{name}") for name in names}
            out.append({"kind": kind, "episodes": row["eval_prompts"]} | at | told)
        before = row["completions"]
    return out
