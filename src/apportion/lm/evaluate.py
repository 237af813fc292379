"""Accuracy of a model on problems: while it is trained, and of a run's folder afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from apportion.core.catalogue import METHODS
from apportion.core.errors import ApportionError
from apportion.lm import metrics
from apportion.lm.collect import Batch, answer
from apportion.lm.data import Dataset
from apportion.lm.generate import Seed, greedy
from apportion.lm.job import Job, prepare
from apportion.runs.display import Display
from apportion.runs.files import SUMMARY, read_config, read_json

MODEL = "model"
"""The folder of the trained model in a run's folder."""

AT_ONCE = 32
"""Problems that are answered between two signs of progress."""

KEPT = (
    "reward", "reward_timeout", "dtype", "device", "system", "plain", "max_tokens", "top_p", "top_k", "eval_size",
    "eval_samples",
)  # fmt: skip
"""Settings of a run that its evaluation shares."""


def evaluation(job: Job, problems: Dataset, progress: Callable[[int], None]) -> tuple[dict[str, Any], Batch]:
    """Accuracy with its interval, pass@k and lengths, under names that begin with eval_; and what was answered.

    One answer to a problem is the most probable one; more are sampled as in training. Unscored answers count as wrong.
    progress: told the number of problems done. Raises ApportionError when no answer could be scored.
    """
    group = job.setup.eval_samples
    sampling = greedy(job.sampling) if group == 1 else job.sampling
    parts: list[Batch] = []
    for start in range(0, len(problems), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(problems)))
        seeds: list[Seed] = [(job.seed, 1, i) for i in numbers]
        examples = [problems[i] for i in numbers]
        completions, texts, scores = answer(job, examples, group, sampling, seeds)
        if scores.failures and not scores.scored.any():
            raise ApportionError(f"no completion could be scored in the evaluation: {scores.example}")
        parts.append(Batch.of(examples, completions, texts, scores))
        progress(numbers[-1] + 1)
    batch = Batch.join(parts)
    found = metrics.answers(batch.right)
    found |= metrics.lengths(batch.completions.lengths, batch.right, batch.completions.truncated)
    found |= {"return_mean": metrics.average(batch.total[batch.scored]), "unscored": int((~batch.scored).sum())}
    return {f"eval_{name}": value for name, value in found.items()}, batch


def evaluate_run(
    out: str | Path, problems: int | None = None, samples: int | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Evaluate the finished run in a folder on its evaluation data (or else its training data).

    problems: how many; None takes as many as the run did. samples: answers to each, and None as many as the run's; one
    is the most probable, more are sampled as in training. quiet: no progress on standard error.
    Raises ApportionError for a folder without a finished run, and for data or rewards that were Python objects.
    """
    out = Path(out)
    config = read_config(out)
    if not (out / SUMMARY).exists():
        raise ApportionError(f"{out} holds a run that is not finished; go on with it by --resume")
    setup = config["setup"]
    where = "eval_data" if setup["eval_data"] else "data"
    for name in (where, "reward"):
        if name in config["given"]:
            raise ApportionError(f"the {name} of {out} was given in Python, so it is not in the folder; use lm.train")
    settings = {name: setup[name] for name in KEPT} | {"model": str(out / MODEL), "data": setup[where]}
    if problems is not None:
        settings["eval_size"] = problems
    if samples is not None:
        settings["eval_samples"] = samples
    same = [("sampler.temperature", config["sampling"]["temperature"])]
    job = prepare(METHODS["reinforce"], settings, same, seed=config["seed"])
    chosen = job.data.first(job.setup.eval_size)
    with Display("eval lm", len(chosen), unit="problems", quiet=quiet, at_first="sampling") as display:
        found, _ = evaluation(job, chosen, display.at)
    done = read_json(out / SUMMARY, "the summary of a run")
    told = {name: done[name] for name in ("method", "task", "model", "seed", "step")}
    return told | {name.removeprefix("eval_"): value for name, value in found.items()}
