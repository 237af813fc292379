"""A cell on a control task: checked, run, and its log read as evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.study import logs

if TYPE_CHECKING:
    from apportion.core.method import Method
    from apportion.study.design import Cell

LOG_BYTES = 120_000
"""metrics.jsonl, timing.jsonl and the small files of a run, about."""


def check(cell: Cell) -> None:
    """Raises ApportionError for what the task cannot run."""
    from apportion.control.train import prepare

    prepare(cell.method, cell.task, cell.budget.amount, cell.settings)


def train(cell: Cell, folder: Path) -> None:
    """The run in its folder, from wherever it stands. Raises as `train_run`."""
    from apportion.control.run import train_run

    train_run(
        cell.method,
        cell.task,
        cell.budget.amount,
        cell.seed,
        folder,
        cell.settings,
        resume=True,
        quiet=True,
        episodes=cell.episodes,
        eval_every=cell.eval_every,
    )


def method(cell: Cell) -> Method:
    """The method as it runs."""
    from apportion.control.presets import resolve

    return resolve(cell.method, cell.task, cell.settings).method


def disk(cell: Cell) -> int:
    """Bytes of the run's folder: a policy, a checkpoint with Adam's two moments, and the logs."""
    from apportion.control.checkpoint import networks_template, size
    from apportion.control.train import prepare

    policy = prepare(cell.method, cell.task, cell.budget.amount, cell.settings).policy
    return 16 * size(networks_template(policy)) + LOG_BYTES


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of the run in a folder, as rows of the study's table."""
    out: list[dict[str, Any]] = []
    for r in logs.rows(folder):
        seconds = r["seconds"] - r.get("eval_seconds", 0.0)
        at = {"steps": r["env_steps"], "seconds": seconds, "compile_seconds": r["compile_seconds"]}
        if r["return_mean"] is not None:
            out.append({"kind": "training", "return_mean": r["return_mean"], "episodes": r["episodes"]} | at)
        if "eval_return_mean" in r:
            names = ("return_mean", "return_low", "return_high", "episodes")
            out.append({"kind": "evaluation"} | {name: r[f"eval_{name}"] for name in names} | at)
    if (end := logs.summary(folder)) is not None:
        low, high = end["return_ci"]
        out.append(
            {"kind": "final", "steps": end["env_steps"], "return_mean": end["return_mean"], "return_low": low}
            | {"return_high": high, "episodes": end["episodes"]}
            | {"seconds": end["wall_seconds"], "compile_seconds": end["compile_seconds"]}
        )
    return out
