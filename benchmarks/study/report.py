"""How long `apportion report` takes for a study of 500 runs, and how large its files are.

    python benchmarks/study/report.py

The runs are made up (tests/study/made_up.py), 200 log rows each: 5 methods on 5 tasks with 20 seeds. The wall-clock is
that of the command, starting Python included; the median of three.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "study"))

from made_up import noisy, write_study

from apportion import study

TASKS = ["CartPole-v1", "Acrobot-v1", "HalfCheetah-v5", "X-v0", "Y-v0"]


def main() -> None:
    """Print seconds and megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        plan = study.plan(["a2c", "dapo", "grpo", "ppo", "rloo"], TASKS, seeds=20, steps=10_000, title="500 runs")
        write_study(plan, out, noisy(), rows=200)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "apportion.cli", "report", out], check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
        print(f"500 runs: {statistics.median(seconds):.1f} s ({', '.join(f'{s:.1f}' for s in seconds)})")
        for name in ("report.html", "report.md", "results.csv", "evaluations.parquet"):
            print(f"  {name:20} {(out / name).stat().st_size / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()
