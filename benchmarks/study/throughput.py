"""What a study costs beside its runs: seconds of overhead a run, and the throughput of two workers against one.

    python benchmarks/study/throughput.py [STEPS]

The same study of 8 runs (PPO on HalfCheetah-v5, or CartPole-v1 without MuJoCo) is run with one worker and with two,
taking turns, three times each, after a first time that fills the compilation cache. Overhead: the wall-clock of
the study with one worker, less that of its runs (wall_seconds in their summaries), a run; starting Python and JAX,
checking, the audit and the report all count.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS, TURNS = 8, 3


def timed(file: Path, out: Path, workers: int) -> tuple[float, float]:
    """Seconds of the study, and of its runs together."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "apportion.cli", "study", str(file), "--out", str(out), "--workers", str(workers)]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    return seconds, sum(json.loads(f.read_text())["wall_seconds"] for f in out.glob("cells/*/summary.json"))


def main(steps: int) -> None:
    """Print the table."""
    task = "HalfCheetah-v5" if importlib.util.find_spec("mujoco") else "CartPole-v1"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        file = folder / "study.toml"
        file.write_text(f'methods = ["ppo"]\ntasks = ["{task}"]\nseeds = {RUNS}\nsteps = {steps}\n')
        timed(file, folder / "first", 2)
        one, two, over = [], [], []
        for turn in range(TURNS):
            seconds, inside = timed(file, folder / f"one{turn}", 1)
            one.append(seconds)
            over.append((seconds - inside) / RUNS)
            two.append(timed(file, folder / f"two{turn}", 2)[0])
    print(f"{RUNS} runs of PPO on {task}, {steps:,} environment steps each, {TURNS} turns")
    print(f"  one worker   {sorted(one)[TURNS // 2]:8.1f} s")
    print(f"  two workers  {sorted(two)[TURNS // 2]:8.1f} s")
    print(f"  throughput   {sorted(one)[TURNS // 2] / sorted(two)[TURNS // 2]:8.2f} times with two workers (medians)")
    print(f"  overhead     {sorted(over)[TURNS // 2]:8.2f} s a run with one worker (median)")


if __name__ == "__main__":
    main(int(float(sys.argv[1])) if len(sys.argv) > 1 else 300_000)
