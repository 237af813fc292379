"""A study's folder with made-up runs, in the files that real ones leave."""

import json

import numpy as np

from apportion.study.files import claim
from apportion.study.publish import METHODS


def write_run(folder, state="done", level=100.0, budget=1_000, rows=20, score=None):
    """A run whose training return rises in a straight line from 0 to `level`; diverged ones stop half way."""
    folder.mkdir(parents=True)
    kept = rows // 2 if state == "diverged" else rows
    steps = [budget * (i + 1) // rows for i in range(kept)]
    log = [{"env_steps": s, "return_mean": level * s / budget, "episodes": 10} for s in steps]
    clock = [{"env_steps": s, "seconds": 2 + s / 100, "compile_seconds": 2.0} for s in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in log))
    (folder / "timing.jsonl").write_text("".join(json.dumps(r) + "\n" for r in clock))
    message = "" if state == "done" else "it went wrong"
    told = {"state": state, "sessions": 1, "message": message, "commit": "0" * 40, "machine": "made up"}
    (folder / "cell.json").write_text(json.dumps(told))
    config = {"method": {"name": "m"}, "versions": {"numpy": "2"}, "overrides": {}, "setup": {}, "steps": budget}
    (folder / "config.json").write_text(json.dumps(config))
    if state == "done":
        end = level if score is None else score
        clocks = {"wall_seconds": clock[-1]["seconds"], "compile_seconds": 2.0}
        summary = {"env_steps": steps[-1], "return_mean": end, "return_ci": [end - 1, end + 1], "episodes": 20}
        (folder / "summary.json").write_text(json.dumps(summary | clocks))


def write_study(plan, out, level, state=lambda cell: "done", rows=20):
    """The whole folder. level, state: of each cell."""
    out.mkdir(parents=True, exist_ok=True)
    claim(out, plan, None)
    for cell in plan.cells():
        write_run(out / cell.folder, state(cell), level(cell), cell.budget.amount, rows)
    told = {a.label: {"name": a.method.name, "card": f"the card of {a.label}", "audit": "audited"} for a in plan.arms}
    (out / METHODS).write_text(json.dumps(told))
    return out


def noisy(seed=0):
    """Levels around 50, higher for the arms that come later in the alphabet."""
    rng = np.random.default_rng(seed)
    return lambda cell: float(50 + 5 * (ord(cell.arm[0]) - ord("a")) + rng.normal(scale=5))
