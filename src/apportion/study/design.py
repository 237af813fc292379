"""What a study compares: methods on tasks over seeds, at one budget, scored and tuned by one rule."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from apportion.core.catalogue import method as entry
from apportion.core.errors import ApportionError, UnknownName
from apportion.core.method import Method
from apportion.core.values import value
from apportion.study.budgets import CONTROL, LANGUAGE, UNITS, Budget, budgets, every
from apportion.study.checks import distinct, is_table, known_only, real, several, text, whole
from apportion.study.tuning import Setting, Tuning

SCORES = ("final", "last_tenth")
MOST_SEEDS = 1_000


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    label: its name in the report. changes: paths and values on top of the task's preset. tune: (path, candidates) of
    its own beside those that every arm has. seeds: those of the study's that it runs with; None for all.
    """

    label: str
    method: Method
    changes: tuple[Setting, ...] = ()
    tune: tuple[Setting, ...] = ()
    seeds: tuple[int, ...] | None = None

    @property
    def slug(self) -> str:
        """The label as a folder's name."""
        return re.sub(r"[^a-z0-9_.+-]+", "-", self.label.lower()).strip("-.") or "arm"


@dataclass(frozen=True)
class Evaluation:
    """How a run is scored.

    episodes: of the evaluation of the final policy, most likely actions (control). score: "final" (their mean return;
    of a language model with evaluation data, its accuracy on it; without, as "last_tenth") or "last_tenth" (mean return
    of what was sampled for training in the last tenth of the budget; accuracy where there is evaluation data). bounds:
    by task, the scores that count as 0 and 1; where none are given, those that the task's rules allow
    (`results.BOUNDS`; 0 and 1 for accuracies), or else the lowest and highest score that the study finds.
    thresholds: by task, the score whose first crossing in training is timed; where none is given, 90% of the way
    between the bounds. every: environment steps between such evaluations on the way, of runs on control tasks (None:
    only the final one); they are drawn beside the training curves.
    """

    episodes: int = 20
    score: str = "final"
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    every: int | None = None


@dataclass(frozen=True)
class Cell:
    """One run: an arm on a task with a seed.

    settings: changes and what tuning chose. folder: where it lies in the study's. eval_every: see `Evaluation.every`;
    tuning has none. trial: which trial of tuning it belongs to, or None. lm: of a language-model task, its table in
    the study file. threads: of PyTorch.
    """

    arm: str
    method: Method
    task: str
    seed: int
    budget: Budget
    folder: str
    settings: tuple[Setting, ...] = ()
    episodes: int = 20
    eval_every: int | None = None
    trial: int | None = None
    imports: tuple[str, ...] = ()
    lm: Mapping[str, Any] | None = None
    threads: int = 1

    @property
    def name(self) -> str:
        """Arm, task and seed in words."""
        tuning = "" if self.trial is None else f", trial {self.trial}"
        return f"{self.arm} on {self.task}, seed {self.seed}{tuning}"


@dataclass(frozen=True)
class Study:
    """A plan, checked but for what only a task can know. Made by `plan`, or from a file by `files.read`.

    budget: of each task. lm: by task, what describes those that are language models' (see `plan`). task_seeds: which of
    the seeds each task has, where they do not all have all.
    """

    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    budget: Mapping[str, Budget]
    title: str = "Study"
    evaluation: Evaluation = field(default_factory=Evaluation)
    tuning: Tuning | None = None
    imports: tuple[str, ...] = ()
    lm: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    task_seeds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def cells(self, chosen: Mapping[tuple[str, str], tuple[Setting, ...]] | None = None) -> list[Cell]:
        """The runs that are compared, a seed of every arm before the next seed.

        chosen: by (arm, task), what tuning picked; arms and tasks that are not in it are left out. None: no tuning.
        """
        return [
            self._cell(arm, task, seed, f"cells/{arm.slug}--{_slug(task)}--seed{seed}", picked)
            for seed in self.seeds
            for task in self.tasks
            for arm in self.arms
            if seed in self.task_seeds.get(task, self.seeds) and (arm.seeds is None or seed in arm.seeds)
            if (picked := () if chosen is None else chosen.get((arm.label, task))) is not None
        ]

    def tuning_cells(self) -> list[Cell]:
        """The runs that choose settings; none without tuning."""
        if self.tuning is None:
            return []
        cells = []
        for trial in range(self.tuning.trials):
            for task in self.tasks:
                for arm in self.arms:
                    settings = self.tuning.drawn(arm.label, arm.tune)[trial]
                    for seed in self.tuning.seeds:
                        folder = f"tuning/{arm.slug}--{_slug(task)}/trial{trial}-seed{seed}"
                        cell = self._cell(arm, task, seed, folder, settings, trial)
                        cells.append(dataclasses.replace(cell, budget=self.tuning.budget.get(task, cell.budget)))
        return cells

    def _cell(
        self, arm: Arm, task: str, seed: int, folder: str, settings: tuple[Setting, ...], trial: int | None = None
    ) -> Cell:
        together = (*arm.changes, *settings)
        budget, episodes, lm = self.budget[task], self.evaluation.episodes, self.lm.get(task)
        every = self.evaluation.every if trial is None and budget.unit in CONTROL else None
        return Cell(
            arm.label, arm.method, task, seed, budget, folder, together, episodes, every, trial, self.imports, lm
        )


def plan(
    methods: Sequence[Any],
    tasks: Sequence[str],
    seeds: int | Sequence[int] | Mapping[str, Any],
    steps: int | Mapping[str, int] | None = None,
    title: str = "Study",
    evaluation: Mapping[str, Any] | Evaluation | None = None,
    tuning: Mapping[str, Any] | Tuning | None = None,
    imports: Sequence[str] = (),
    completions: int | Mapping[str, int] | None = None,
    tokens: int | Mapping[str, int] | None = None,
    lm: Mapping[str, Mapping[str, Any]] | None = None,
) -> Study:
    """The study of these methods on these tasks. The arguments are the keys of a study file.

    methods: names, `Method`s, `Arm`s or tables {method, label, set, tune, seeds}. tasks: Gymnasium ids, or names in lm.
    seeds: how many (from 0), or which; or a table of these by task. steps: environment steps of every run, or by task.
    imports: modules to import before a run, for tasks of one's own.

    lm: by task, what makes it a language model's: {preset} and fields of `lm.Setup` (model, data, reward, eval_data and
    so on) but its budget. completions, tokens: the budget of its runs, in one of the two, or by task. What is sampled
    counts, whatever becomes of it, so that it is the same for a method that throws much away.

    Raises ApportionError naming what does not fit.

    >>> [cell.name for cell in plan(["ppo", "dr_grpo"], ["CartPole-v1"], seeds=1, steps=1000).cells()]
    ['ppo on CartPole-v1, seed 0', 'dr_grpo on CartPole-v1, seed 0']
    """
    by_task = _seeds_by_task(seeds, several("tasks", tasks)) if isinstance(seeds, Mapping) else {}
    numbers = tuple(sorted(set(chain(*by_task.values())))) if by_task else seed_list("seeds", seeds)
    arms = tuple(_arm(m, numbers) for m in several("methods", methods))
    distinct("methods", [a.label for a in arms], "give each its own label")
    distinct("methods", [a.slug for a in arms], "labels must differ in more than case and signs")
    tasks = distinct("tasks", [text("task", t) for t in several("tasks", tasks)], "name each once")
    models = _models(lm or {}, tasks)
    return Study(
        arms,
        tasks,
        numbers,
        every({"steps": steps, "completions": completions, "tokens": tokens}, tasks, models),
        text("title", title),
        evaluation if isinstance(evaluation, Evaluation) else _evaluation(evaluation or {}, tasks, models),
        tuning if isinstance(tuning, Tuning | None) else _tuning(tuning, arms, tasks, numbers, models),
        tuple(text("imports", name) for name in imports),
        models,
        by_task,
    )


def _seeds_by_task(given: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, tuple[int, ...]]:
    known_only("task in seeds", given, tasks)
    for task in tasks:
        if task not in given:
            raise ApportionError(f"seeds has no number for {task}; where it is a table, it names every task")
    return {task: seed_list(f"seeds of {task}", given[task]) for task in tasks}


def seed_list(name: str, seeds: Any) -> tuple[int, ...]:
    """The seeds as numbers: n stands for 0 to n - 1."""
    if whole(seeds) and 1 <= seeds <= MOST_SEEDS:
        return tuple(range(seeds))
    if isinstance(seeds, list | tuple) and seeds and all(whole(s) and 0 <= s < 2**32 for s in seeds):
        return distinct(name, seeds, "name each once")
    raise ApportionError(f"{name} is {seeds!r}; give how many (1 to {MOST_SEEDS:,}), or a list such as [0, 1, 2]")


def settings_of(where: str, table: Any) -> tuple[Setting, ...]:
    """A table of paths and values as pairs; a text is read as `--set` reads it, so that it may name a part."""
    if not isinstance(table, Mapping):
        raise ApportionError(f"{where} is {table!r}; it must be a table such as {{ 'sampler.group' = 8 }}")
    return tuple((path, value(v) if isinstance(v, str) else v) for path, v in table.items())


def _arm(given: Any, seeds: Sequence[int]) -> Arm:
    if isinstance(given, Arm):
        return given
    if isinstance(given, Method):
        return Arm(given.name, given)
    if isinstance(given, str):
        return Arm(given, entry(given))
    if not isinstance(given, Mapping) or "method" not in given:
        raise ApportionError(f"methods holds {given!r}; give a name, or a table such as {{ method = 'grpo' }}")
    known_only("key of a method", given, ("method", "label", "set", "tune", "seeds"))
    chosen = given["method"]
    method = chosen if isinstance(chosen, Method) else entry(text("method", chosen))
    label = text("label", given.get("label", method.name))
    tune = given.get("tune", {})
    if not isinstance(tune, Mapping):
        raise ApportionError(f"tune of {label} is {tune!r}; it must be a table of lists of candidates")
    own = seed_list(f"seeds of {label}", given["seeds"]) if "seeds" in given else None
    if strange := sorted(set(own or ()) - set(seeds)):
        raise ApportionError(f"seeds of {label} holds {strange[0]}, which is none of the study's seeds; add it there")
    return Arm(label, method, settings_of(f"set of {label}", given.get("set", {})), tuple(tune.items()), own)


def _models(lm: Any, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The language-model tasks: what describes each, as plain values, so that study.json can hold it."""
    is_table("lm", lm)
    known_only("task in lm", lm, tasks)
    out: dict[str, dict[str, Any]] = {}
    for task, table in lm.items():
        is_table(f"lm.{task}", table)
        if not re.fullmatch(r"[\w.-]+", task):
            raise ApportionError(f"lm holds the task {task!r}; its name may have letters, digits and _ . - only")
        for name in ("steps", *LANGUAGE):
            if name in table:
                raise ApportionError(
                    f"lm.{task} holds {name} = {table[name]!r}; the budget is the study's: give completions or tokens"
                )
        out[task] = {}
        for name, given in table.items():
            try:
                out[task][name] = json.loads(json.dumps(given, allow_nan=False))
            except (TypeError, ValueError):
                raise ApportionError(
                    f"lm.{task}.{name} is {type(given).__name__}; every process of a study reads it from a file: "
                    "give text, such as FILE.py:FUNCTION for a reward"
                ) from None
    return out


def _evaluation(table: Any, tasks: Sequence[str], models: Mapping[str, Any]) -> Evaluation:
    is_table("evaluation", table)
    known_only("key of evaluation", table, [f.name for f in dataclasses.fields(Evaluation)])
    out = Evaluation(**table)
    if not whole(out.episodes) or out.episodes < 1:
        raise ApportionError(f"evaluation.episodes is {out.episodes!r}; it must be a whole number of 1 or more")
    if out.every is not None and (not whole(out.every) or out.every < 1):
        raise ApportionError(
            f"evaluation.every is {out.every!r}; it must be a whole number of environment steps, 1 or more"
        )
    if out.every is not None and set(tasks) <= set(models):
        raise ApportionError(
            f"evaluation.every is {out.every} environment steps, and no task has any; give eval_every in lm.{tasks[0]}"
        )
    if out.score not in SCORES:
        raise UnknownName("evaluation.score", str(out.score), SCORES)
    for name in ("bounds", "thresholds"):
        is_table(f"evaluation.{name}", getattr(out, name))
        known_only(f"task in evaluation.{name}", getattr(out, name), tasks)
    for task, pair in out.bounds.items():
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(real, pair)) and pair[0] < pair[1]):
            raise ApportionError(f"evaluation.bounds of {task} is {pair!r}; give the lower and the higher return")
    for task, level in out.thresholds.items():
        if not real(level):
            raise ApportionError(f"evaluation.thresholds of {task} is {level!r}; it must be a return")
    return dataclasses.replace(out, bounds={task: (float(a), float(b)) for task, (a, b) in out.bounds.items()})


def _tuning(
    table: Any, arms: Sequence[Arm], tasks: Sequence[str], seeds: Sequence[int], lm: Mapping[str, Any]
) -> Tuning:
    is_table("tuning", table)
    known_only("key of tuning", table, [*(f.name for f in dataclasses.fields(Tuning) if f.name != "budget"), *UNITS])
    for name in ("trials", "seeds", "candidates"):
        if name not in table:
            raise ApportionError(f"tuning lacks '{name}'")
    is_table("tuning.candidates", table["candidates"])
    numbers = seed_list("tuning.seeds", table["seeds"])
    if shared := sorted(set(numbers) & set(seeds)):
        raise ApportionError(
            f"tuning.seeds and seeds share {shared[0]}; a seed that chose the settings cannot judge them"
        )
    budget = budgets({unit: table.get(unit) for unit in UNITS}, tasks, lm, "tuning.")
    own = {name: given for name, given in table.items() if name not in UNITS}
    out = Tuning(**{**own, "seeds": numbers, "budget": budget, "candidates": tuple(table["candidates"].items())})
    for arm in arms:
        out.drawn(arm.label, arm.tune)
    return out


def _slug(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", task)
