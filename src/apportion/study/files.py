"""Study files: TOML text to a `Study`, presets by name, and the folder's own record of what it studies."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from apportion.core.errors import ApportionError, UnknownName
from apportion.runs.files import read_json, write_atomic, write_json
from apportion.runs.folder import agree, described, versions
from apportion.study import budgets
from apportion.study.checks import known_only
from apportion.study.design import Arm, Study, plan

STUDY, SOURCE, TUNING = "study.json", "study.toml", "tuning.json"


def presets() -> list[str]:
    """Names of the studies that come with the package."""
    folder = resources.files("apportion.study").joinpath("presets")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def source(file_or_preset: str) -> tuple[str, str]:
    """(name, text) of a study file, or of a preset where there is no such file.

    Raises ApportionError for a file that cannot be read, UnknownName when there is neither.
    """
    path = Path(file_or_preset)
    if path.suffix != ".toml" and not path.exists():
        if file_or_preset not in presets():
            raise UnknownName("study (no such file either)", file_or_preset, presets())
        text = resources.files("apportion.study").joinpath("presets", f"{file_or_preset}.toml").read_text("utf-8")
        return file_or_preset, text
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ApportionError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # what `imports` names may lie beside the file
        sys.path.insert(0, folder)
    return path.stem, text


def read(text: str, name: str = "the study") -> Study:
    """The study that a TOML text declares. Raises ApportionError naming what is wrong in it.

    >>> read('methods = ["ppo"]\\ntasks = ["CartPole-v1"]\\nseeds = 2\\nsteps = 60000').seeds
    (0, 1)
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ApportionError(f"{name} is not TOML: {error}") from error
    parameters = inspect.signature(plan).parameters.values()
    known_only(f"key of {name}", table, [p.name for p in parameters])
    for p in parameters:
        if p.default is p.empty and p.name not in table:
            raise ApportionError(f"{name} lacks '{p.name}'")
    return plan(**{"title": name} | table)


def load_modules(names: tuple[str, ...]) -> None:
    """Import what the study's tasks need. Raises ApportionError for a module that does not import."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ApportionError(f"imports names {name}, which cannot be imported: {error}") from error


def record(study: Study) -> dict[str, Any]:
    """What study.json holds: everything that decides the study, and its runs, for who watches or reports it."""
    e, t = study.evaluation, study.tuning
    return {
        "title": study.title,
        "arms": {a.label: _arm(a) for a in study.arms},
        "tasks": list(study.tasks),
        "seeds": list(study.seeds),
        **({"task_seeds": {task: list(own) for task, own in study.task_seeds.items()}} if study.task_seeds else {}),
        **budgets.plain(study.budget),
        **({"lm": study.lm} if study.lm else {}),
        "evaluation": {
            "episodes": e.episodes,
            "score": e.score,
            "bounds": {task: list(pair) for task, pair in e.bounds.items()},
            "thresholds": dict(e.thresholds),
            **({} if e.every is None else {"every": e.every}),
        },
        "tuning": None
        if t is None
        else {
            "trials": t.trials,
            "seeds": list(t.seeds),
            **budgets.plain(t.budget),
            "draw": t.draw,
            "drawn": {a.label: [_plain(s) for s in t.drawn(a.label, a.tune)] for a in study.arms},
        },
        "imports": list(study.imports),
        "cells": [
            {
                "arm": c.arm,
                "task": c.task,
                "seed": c.seed,
                "budget": c.budget.amount,
                "folder": c.folder,
                "trial": c.trial,
            }
            for c in (*study.tuning_cells(), *study.cells())
        ],
        "versions": versions(*_packages(study)),
    }


def _arm(arm: Arm) -> dict[str, Any]:
    told: dict[str, Any] = {"method": described(arm.method), "changes": _plain(arm.changes)}
    return told if arm.seeds is None else told | {"seeds": list(arm.seeds)}


def _packages(study: Study) -> list[str]:
    """Those that the study's numbers depend on."""
    control = ["jax", "jaxlib", "numpy", "optax"] if set(study.tasks) - set(study.lm) else ["numpy"]
    return [*control, "torch", "transformers"] if study.lm else control


def _plain(settings: Any) -> dict[str, str]:
    return {path: repr(value) for path, value in settings}


def claim(out: Path, study: Study, text: str | None) -> None:
    """Make the folder this study's, or find that it is. Raises ApportionError for another's."""
    here = record(study)
    if not (out / STUDY).exists():
        if text is not None:
            write_atomic(out / SOURCE, text.encode())
        write_json(out / STUDY, here)
        return
    agree(out, "study", here, read_record(out), "name another --out")


def read_record(out: str | os.PathLike[str]) -> dict[str, Any]:
    """What study.json of a study's folder holds. Raises ApportionError where there is none."""
    path = Path(out) / STUDY
    if not path.exists():
        raise ApportionError(f"{out} holds no study (no {STUDY}); name a folder that `apportion study` wrote")
    return read_json(path, "the record of a study")
