"""Completions to look at: a few of a batch, as lines of a file and as a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from apportion.lm.collect import Batch
from apportion.lm.job import Job

WIDTH = 160
"""Characters of a prompt or completion that the table shows."""


def records(job: Job, batch: Batch, step: int, kind: str) -> list[dict[str, Any]]:
    """The first `samples` prompts of a batch, each with its first response, as JSON holds them.

    kind: "eval" or "train", the data that they come from.
    """
    told = []
    for n in range(min(job.setup.samples, len(batch.examples))):
        example = batch.examples[n]
        value = {r.name: float(v) for r, v in zip(job.rewards, batch.value[n, 0], strict=True) if np.isfinite(v)}
        answer = example.columns.get("answer")
        told.append(
            {
                "step": step,
                "kind": kind,
                "prompt": example.prompt,
                "completion": batch.texts[n][0],
                "answer": answer if answer is None else str(answer),
                "reward": value,
                "truncated": bool(batch.completions.truncated[n, 0]),
            }
        )
    return told


def table(told: list[dict[str, Any]]) -> Any:
    """The records as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=f"step {told[0]['step']} ({told[0]['kind']})", expand=True)
    for name, ratio in (("prompt", 4), ("completion", 6), ("answer", 1), ("reward", 2)):
        shown.add_column(name, ratio=ratio, overflow="fold")
    for r in told:
        prompt = r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][-1]["content"]
        reward = "  ".join(f"{name} {value:g}" for name, value in r["reward"].items()) or "unscored"
        cut = r["completion"][:WIDTH] + ("…" if r["truncated"] or len(r["completion"]) > WIDTH else "")
        shown.add_row(*map(Text, (prompt[-WIDTH:], cut, r["answer"] or "", reward)))
    return shown
