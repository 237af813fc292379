"""Accuracy on unseen sums before and after each run of a study of language models: most probable answer, and sampled.

    apportion study lm_arithmetic --out studies/sums && python benchmarks/lm/arithmetic.py studies/sums

The study's own score is the accuracy of the most probable answers. Training samples at temperature 1, so what it
improves is also measured there: 2 answers to each of the 200 problems, of the model as it was and of every ended run.
Also printed: mean lengths of right and wrong training answers over the first and last five steps, and minutes a run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from apportion.study import logs

SAMPLES, EDGE = 2, 5


def before(preset: str) -> dict[str, Any]:
    """Sampled answers of the model that the preset names."""
    from apportion import methods
    from apportion.lm.evaluate import evaluation
    from apportion.lm.job import prepare

    job = prepare(methods.dr_grpo, {"eval_samples": SAMPLES}, preset=preset)
    assert job.eval_data is not None
    return evaluation(job, job.eval_data, lambda done: None)[0]


def lengths(run: Path, name: str) -> str:
    """Mean of a length over the first steps and over the last ones."""
    found = [row[name] for row in logs.rows(run) if row.get(name) is not None]
    return f"{np.mean(found[:EDGE]):5.1f} to {np.mean(found[-EDGE:]):4.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, metavar="DIR")
    parser.add_argument("--preset", default="lm_arithmetic")
    args = parser.parse_args()
    from apportion.lm.evaluate import evaluate_run

    start = before(args.preset)["eval_accuracy"]
    print(f"sampled {SAMPLES} times a problem, the untrained model is right in {start:.1%}\n")
    print(
        f"{'run':<34}{'most probable':>16}{'sampled':>9}{'gain':>7}{'right, tokens':>16}{'wrong, tokens':>16}{'min':>6}"
    )
    for run in sorted((args.study / "cells").iterdir()):
        if (done := logs.summary(run)) is None:
            print(f"{run.name:<34} has not ended")
            continue
        sampled = evaluate_run(run, samples=SAMPLES, quiet=True)["accuracy"]
        greedy = f"{done['eval_accuracy_before']:.1%} {done['eval_accuracy']:.1%}"
        told = f"{run.name:<34}{greedy:>16}{sampled:>9.1%}{100 * (sampled - start):>+7.1f}"
        told += f"{lengths(run, 'length_right'):>16}{lengths(run, 'length_wrong'):>16}{done['wall_seconds'] / 60:>6.1f}"
        print(told, flush=True)


if __name__ == "__main__":
    main()
