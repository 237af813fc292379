"""Figures 3, 4 and 5: training runs (three seeds, median) and ascents of exact expected updates."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from apportion.audit.expectation import expected_update
from apportion.audit.figures.rows import Figure, Plot, Row, Series
from apportion.audit.flow import follow
from apportion.audit.report import policy_of
from apportion.core.catalogue import distill, dpo, dr_grpo, grpo, ppo_rlhf, raft, reinforce, rloo
from apportion.core.errors import ApportionWarning
from apportion.core.method import Method
from apportion.core.parts import (
    KL,
    Constant,
    DecisionMean,
    GroupStd,
    KeepAccepted,
    NoKL,
    NoScale,
    RewardToGo,
)
from apportion.core.update import ValueLoss
from apportion.toy import policy
from apportion.toy.collect import BETA, Measures
from apportion.toy.language import Language, language
from apportion.toy.train import preset, train

SEEDS = 3
FLOOR = 1e-5
"""Where the logarithmic plots stop: exact curves go on down to rounding."""


@dataclass(frozen=True)
class Job:
    """One run: a curve of a figure. `seed` None is an ascent of the exact expected update."""

    figure: int
    name: str
    method: Method
    task: str = "toy"
    steps: int = 1_000
    seed: int | None = None
    every: int = 10
    final_fraction: float = 0.02
    options: Mapping[str, Any] = field(default_factory=dict)


Results = Mapping[tuple[int, str], list[tuple[Measures, ...]]]


def run(job: Job) -> tuple[Measures, ...]:
    """The rows of one job."""
    lang = one_decision(language("toy")) if job.task == "toy, one decision" else language(job.task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApportionWarning)  # some curves show what the warnings warn of
        if job.seed is None:
            options = {"rate": 0.05, "final_fraction": job.final_fraction} | dict(job.options)
            return follow(job.method, lang, steps=job.steps, every=job.every, **options).rows
        return train(job.method, lang, job.steps, job.seed, group=8, every=job.every, **job.options).rows


def one_decision(lang: Language) -> Language:
    """The same task with a whole response as one decision: penalties of a sequence are then those of a decision."""
    S = len(lang.sequences)
    every = np.arange(S)[:, None]
    return dataclasses.replace(
        lang,
        name=lang.name + ", one decision",
        V=S,
        L=1,
        eos=None,
        sequences=every,
        prefix=np.zeros((S, 1), dtype=np.int64),
        mask=np.ones((S, 1)),
        length=np.ones(S, dtype=np.int64),
        reference=policy.sequence_log_probs(lang, lang.reference)[:, None, :],
        edge=every,
        end=np.arange(S),
        child=~np.arange(S)[None, :],
        levels=(slice(0, 1),),
    )


def _median(results: Results, key: tuple[int, str], measure: str) -> np.ndarray:
    """Median over seeds at each measurement."""
    return np.median([[row[measure] for row in rows] for rows in results[key]], axis=0)


def _steps(results: Results, key: tuple[int, str]) -> list[float]:
    return [row["step"] for row in results[key][0]]


# --- figure 3: length ------------------------------------------------------------------------------------

_STD = grpo.replace(kl=NoKL(), scale=GroupStd(ddof=0, eps=1e-8))
LENGTH = {
    "GRPO": (_STD, 2.2, 4.8),
    "constant normaliser, std kept": (_STD.replace(aggregate=Constant()), 2.6, 4.6),
    "Dr. GRPO": (dr_grpo, 3.0, 4.6),
}


def length_jobs(steps: int = 400, seeds: int = SEEDS) -> list[Job]:
    """The runs of figure 3: no cosine."""
    return [
        Job(3, name, preset(method, learning_rate=0.02, anneal="constant"), "toy-eos", steps, seed)
        for name, (method, _, _) in LENGTH.items()
        for seed in range(seeds)
    ]


def length_bias(results: Results) -> Figure:
    """Figure 3: what a length divisor does to lengths."""
    start = policy.mean_length(language("toy-eos"), language("toy-eos").reference)
    rows = [
        Row(3, "reference, correct", 4.53, float(start.correct.mean()), 5e-3),
        Row(3, "reference, wrong", 3.97, float(start.wrong.mean()), 5e-3),
    ]
    series = []
    for name, (_, correct, wrong) in LENGTH.items():
        for side, published in (("correct", correct), ("wrong", wrong)):
            curve = _median(results, (3, name), f"length_{side}")
            how = f"{len(results[3, name])} seeds"
            rows.append(Row(3, f"{name}, {side}", published, float(curve[-1]), 0.15, how))
            series.append(Series(f"{name}, {side}", _steps(results, (3, name)), curve.tolist()))
    plot = Plot("3. Length is never rewarded (toy-eos)", "step", "mean length, decisions", series)
    return Figure(3, rows, plot)


# --- figure 4: all roads ---------------------------------------------------------------------------------

_EXACT = reinforce.replace(kl=KL("reward", "k1", BETA))
_TWICE = grpo.replace(scale=GroupStd(ddof=0, eps=1e-8)).set("sampler.epochs", 2)
_ACCEPT = raft.replace(sampler=raft.sampler.replace(group=1, proposer="reference", keep=KeepAccepted(BETA)))
ROADS: dict[str, tuple[Method, float, float, dict[str, Any] | None]] = {
    # name: method, published KL to pi*, tolerance, options of the sampled run (None: exact)
    "exact gradient": (_EXACT, 0.0, 1e-4, None),
    "DPO, infinite pairs": (preset(dpo), 0.0, 1e-4, None),
    "distillation from pi*": (
        preset(distill.replace(credit=RewardToGo(0.0), aggregate=DecisionMean())),
        5.4e-3,
        6e-4,
        {},
    ),
    "rejection sampling, 100k": (preset(_ACCEPT), 8.4e-3, 1e-3, {"pool": 100_000}),
    "rejection sampling, 5k": (preset(_ACCEPT), 6.3e-2, 8e-3, {"pool": 5_000}),
    "RLOO, KL in the reward": (preset(rloo), 9.2e-3, 1e-3, {}),
    "PPO-RLHF": (
        preset(ppo_rlhf.replace(scale=NoScale(), value_loss=ValueLoss(0.5)), learning_rate=0.02),
        1.3e-2,
        2.5e-3,
        {},
    ),
    "DPO, 100k pairs": (preset(dpo), 1.9e-2, 2.5e-3, {"pool": 100_000}),
    "DPO, 5k pairs": (preset(dpo), 0.29, 0.06, {"pool": 5_000}),
    "GRPO, k1 in the reward": (preset(_TWICE.replace(kl=KL("reward", "k1", BETA))), 2.2e-2, 3e-3, {}),
    "GRPO as published": (preset(_TWICE), 1.08, 0.15, {}),
    "GRPO without the std": (preset(_TWICE.replace(scale=NoScale())), 0.49, 0.1, {}),
}


def road_jobs(steps: int = 1_000, seeds: int = SEEDS) -> list[Job]:
    """The runs of figure 4, the longest first so that two processes end together."""
    jobs = []
    for name, (method, _, _, options) in ROADS.items():
        if options is None:
            jobs.append(Job(4, name, method, steps=steps))
        else:
            jobs += [Job(4, name, method, steps=steps, seed=s, options=options) for s in range(seeds)]
    return sorted(jobs, key=lambda j: not (j.seed is None or j.method.sampler.epochs > 1 or j.options))


def all_roads(results: Results) -> Figure:
    """Figure 4: who arrives at pi*."""
    rows, series = [], []
    for name, (_, published, tolerance, options) in ROADS.items():
        curve = _median(results, (4, name), "kl_to_optimum")
        how = "exact" if options is None else f"{len(results[4, name])} seeds"
        rows.append(Row(4, name, published, float(curve[-1]), tolerance, how))
        series.append(Series(name, _steps(results, (4, name)), np.maximum(curve, FLOOR).tolist()))
    away = float(_median(results, (4, "GRPO as published"), "kl_to_reference")[-1])
    rows.append(Row(4, "GRPO as published, KL to the reference", 1.83, away, 0.15, f"{SEEDS} seeds"))
    return Figure(4, rows, Plot("4. All roads to pi*", "step", f"KL(pi || pi*), nats, floor {FLOOR:g}", series, "y"))


# --- figure 5: where the penalty goes --------------------------------------------------------------------

_PLACES: dict[str, tuple[KL, str]] = {
    "k1 in the reward": (KL("reward", "k1", BETA), "toy"),
    "k2 in the loss, sequence": (KL("loss", "k2", BETA), "toy, one decision"),
    "k3 in the loss, sequence": (KL("loss", "k3", BETA), "toy, one decision"),
    "k3 in the loss, token": (KL("loss", "k3", BETA), "toy"),
    "k2 in the loss, token": (KL("loss", "k2", BETA), "toy"),
    "k1 in the loss": (KL("loss", "k1", BETA), "toy"),
}


def _penalised(kl: KL) -> Method:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApportionWarning)
        return reinforce.replace(kl=kl)


def placement_jobs(steps: int = 1_500) -> list[Job]:
    """The ascents of figure 5: a constant rate."""
    return [
        Job(5, name, _penalised(kl), task, steps, every=25, final_fraction=1.0) for name, (kl, task) in _PLACES.items()
    ]


def placement(results: Results) -> Figure:
    """Figure 5: the same penalty, by place and estimator."""
    lang = language("toy")
    logits = policy_of("perturbed", lang)
    silent = expected_update(_penalised(_PLACES["k1 in the loss"][0]), lang, logits) - expected_update(
        reinforce, lang, logits
    )

    def end(name: str, measure: str = "kl_to_optimum") -> float:
        return results[5, name][0][-1][measure]

    rows = [
        Row(5, "k1 in the reward, KL to pi*", 0.0, end("k1 in the reward"), 1e-4),
        Row(5, "k2 in the loss (sequence), KL to pi*", 0.0, end("k2 in the loss, sequence"), 1e-4),
        Row(5, "k1 in the loss, norm of its expected gradient", 0.0, float(np.sqrt((silent**2).sum())), 1e-12),
        Row(5, "k3 in the loss (sequence), KL to pi*", 0.130, end("k3 in the loss, sequence"), 5e-3),
        Row(
            5,
            "k3 in the loss (token), KL to pi*",
            1.07,
            end("k3 in the loss, token"),
            None,
            remark="the published 1.07 is the KL to the reference",
            correction=True,
        ),
        Row(
            5,
            "k3 in the loss (token), KL to the reference",
            1.07,
            end("k3 in the loss, token", "kl_to_reference"),
            0.01,
        ),
        Row(5, "k2 in the loss (token), KL to pi*", None, end("k2 in the loss, token"), None),
    ]
    series = [
        Series(
            name, _steps(results, (5, name)), np.maximum(_median(results, (5, name), "kl_to_optimum"), FLOOR).tolist()
        )
        for name in _PLACES
    ]
    return Figure(
        5, rows, Plot("5. Where the penalty goes", "step", f"KL(pi || pi*), nats, floor {FLOOR:g}", series, "y")
    )
