"""What a study compares: methods on tasks over seeds, at one budget, scored and tuned by one rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apportion.core.catalogue import method as entry
from apportion.core.errors import ApportionError, UnknownName
from apportion.core.method import Method
from apportion.core.values import value
from apportion.study.tuning import Setting, Tuning

SCORES = ("final", "last_tenth")
MOST_SEEDS = 1_000


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    label: its name in the report. changes: paths and values on top of the task's preset. tune: (path, candidates) of
    its own beside those that every arm has.
    """

    label: str
    method: Method
    changes: tuple[Setting, ...] = ()
    tune: tuple[Setting, ...] = ()

    @property
    def slug(self) -> str:
        """The label as a folder's name."""
        return re.sub(r"[^a-z0-9_.+-]+", "-", self.label.lower()).strip("-.") or "arm"


@dataclass(frozen=True)
class Evaluation:
    """How a run is scored.

    episodes: of the evaluation of the final policy, most likely actions. score: "final" (their mean return) or
    "last_tenth" (mean return of the training episodes that ended in the last tenth of the budget). bounds: by task, the
    returns that count as 0 and 1; where none are given, those that the task's rules allow (`results.BOUNDS`), or
    else the lowest and highest score that the study finds.
    thresholds: by task, the return whose first crossing is timed; where none is given, 90% of the way between the
    bounds.
    """

    episodes: int = 20
    score: str = "final"
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run: an arm on a task with a seed.

    budget: environment steps, in control. settings: changes and what tuning chose. folder: where it lies in the
    study's. trial: which trial of tuning it belongs to, or None.
    """

    arm: str
    method: Method
    task: str
    seed: int
    budget: int
    folder: str
    settings: tuple[Setting, ...] = ()
    episodes: int = 20
    trial: int | None = None
    imports: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Arm, task and seed in words."""
        tuning = "" if self.trial is None else f", trial {self.trial}"
        return f"{self.arm} on {self.task}, seed {self.seed}{tuning}"


@dataclass(frozen=True)
class Study:
    """A plan, checked but for what only a task can know. Made by `plan`, or from a file by `files.read`.

    steps: environment steps of each task.
    """

    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: Mapping[str, int]
    title: str = "Study"
    evaluation: Evaluation = field(default_factory=Evaluation)
    tuning: Tuning | None = None
    imports: tuple[str, ...] = ()

    def cells(self, chosen: Mapping[tuple[str, str], tuple[Setting, ...]] | None = None) -> list[Cell]:
        """The runs that are compared, a seed of every arm before the next seed.

        chosen: by (arm, task), what tuning picked; arms and tasks that are not in it are left out. None: no tuning.
        """
        return [
            self._cell(arm, task, seed, f"cells/{arm.slug}--{_slug(task)}--seed{seed}", picked)
            for seed in self.seeds
            for task in self.tasks
            for arm in self.arms
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
                        cells.append(dataclasses.replace(cell, budget=self.tuning.steps.get(task, cell.budget)))
        return cells

    def _cell(
        self, arm: Arm, task: str, seed: int, folder: str, settings: tuple[Setting, ...], trial: int | None = None
    ) -> Cell:
        together = (*arm.changes, *settings)
        steps, episodes = self.steps[task], self.evaluation.episodes
        return Cell(arm.label, arm.method, task, seed, steps, folder, together, episodes, trial, self.imports)


def plan(
    methods: Sequence[Any],
    tasks: Sequence[str],
    seeds: int | Sequence[int],
    steps: int | Mapping[str, int],
    title: str = "Study",
    evaluation: Mapping[str, Any] | Evaluation | None = None,
    tuning: Mapping[str, Any] | Tuning | None = None,
    imports: Sequence[str] = (),
) -> Study:
    """The study of these methods on these tasks. The arguments are the keys of a study file.

    methods: names, `Method`s, `Arm`s or tables {method, label, set, tune}. seeds: how many (from 0), or which. steps:
    environment steps of every run, or by task. imports: modules to import before a run, for tasks of one's own. Raises
    ApportionError naming what does not fit.

    >>> [cell.name for cell in plan(["ppo", "dr_grpo"], ["CartPole-v1"], seeds=1, steps=1000).cells()]
    ['ppo on CartPole-v1, seed 0', 'dr_grpo on CartPole-v1, seed 0']
    """
    arms = tuple(_arm(m) for m in _several("methods", methods))
    _distinct("methods", [a.label for a in arms], "give each its own label")
    _distinct("methods", [a.slug for a in arms], "labels must differ in more than case and signs")
    tasks = _distinct("tasks", [_text("task", t) for t in _several("tasks", tasks)], "name each once")
    numbers = seed_list("seeds", seeds)
    return Study(
        arms,
        tasks,
        numbers,
        budgets("steps", steps, tasks),
        _text("title", title),
        evaluation if isinstance(evaluation, Evaluation) else _evaluation(evaluation or {}, tasks),
        tuning if isinstance(tuning, Tuning | None) else _tuning(tuning, arms, tasks, numbers),
        tuple(_text("imports", name) for name in imports),
    )


def known_only(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UnknownName for the first name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UnknownName(where, name, known)


def seed_list(name: str, seeds: Any) -> tuple[int, ...]:
    """The seeds as numbers: n stands for 0 to n - 1."""
    if whole(seeds) and 1 <= seeds <= MOST_SEEDS:
        return tuple(range(seeds))
    if isinstance(seeds, list | tuple) and seeds and all(whole(s) and 0 <= s < 2**32 for s in seeds):
        return _distinct(name, seeds, "name each once")
    raise ApportionError(f"{name} is {seeds!r}; give how many (1 to {MOST_SEEDS:,}), or a list such as [0, 1, 2]")


def budgets(name: str, steps: Any, tasks: Sequence[str]) -> dict[str, int]:
    """Environment steps of each task."""
    given = steps if isinstance(steps, Mapping) else dict.fromkeys(tasks, steps)
    known_only(f"task in {name}", given, tasks)
    for task in tasks:
        if task not in given:
            raise ApportionError(f"{name} has no number for {task}; give every task its environment steps")
        if not whole(given[task]) or given[task] < 1:
            raise ApportionError(
                f"{name} is {given[task]!r} for {task}; it must be a whole number of environment steps, 1 or more"
            )
    return dict(given)


def whole(x: Any) -> bool:
    """Whether x is an int and no bool."""
    return isinstance(x, int) and not isinstance(x, bool)


def settings_of(where: str, table: Any) -> tuple[Setting, ...]:
    """A table of paths and values as pairs; a text is read as `--set` reads it, so that it may name a part."""
    if not isinstance(table, Mapping):
        raise ApportionError(f"{where} is {table!r}; it must be a table such as {{ 'sampler.group' = 8 }}")
    return tuple((path, value(v) if isinstance(v, str) else v) for path, v in table.items())


def _arm(given: Any) -> Arm:
    if isinstance(given, Arm):
        return given
    if isinstance(given, Method):
        return Arm(given.name, given)
    if isinstance(given, str):
        return Arm(given, entry(given))
    if not isinstance(given, Mapping) or "method" not in given:
        raise ApportionError(f"methods holds {given!r}; give a name, or a table such as {{ method = 'grpo' }}")
    known_only("key of a method", given, ("method", "label", "set", "tune"))
    chosen = given["method"]
    method = chosen if isinstance(chosen, Method) else entry(_text("method", chosen))
    label = _text("label", given.get("label", method.name))
    tune = given.get("tune", {})
    if not isinstance(tune, Mapping):
        raise ApportionError(f"tune of {label} is {tune!r}; it must be a table of lists of candidates")
    return Arm(label, method, settings_of(f"set of {label}", given.get("set", {})), tuple(tune.items()))


def _evaluation(table: Any, tasks: Sequence[str]) -> Evaluation:
    _is_table("evaluation", table)
    known_only("key of evaluation", table, [f.name for f in dataclasses.fields(Evaluation)])
    out = Evaluation(**table)
    if not whole(out.episodes) or out.episodes < 1:
        raise ApportionError(f"evaluation.episodes is {out.episodes!r}; it must be a whole number of 1 or more")
    if out.score not in SCORES:
        raise UnknownName("evaluation.score", str(out.score), SCORES)
    for name in ("bounds", "thresholds"):
        _is_table(f"evaluation.{name}", getattr(out, name))
        known_only(f"task in evaluation.{name}", getattr(out, name), tasks)
    for task, pair in out.bounds.items():
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_real, pair)) and pair[0] < pair[1]):
            raise ApportionError(f"evaluation.bounds of {task} is {pair!r}; give the lower and the higher return")
    for task, level in out.thresholds.items():
        if not _real(level):
            raise ApportionError(f"evaluation.thresholds of {task} is {level!r}; it must be a return")
    return dataclasses.replace(out, bounds={task: (float(a), float(b)) for task, (a, b) in out.bounds.items()})


def _tuning(table: Any, arms: Sequence[Arm], tasks: Sequence[str], seeds: Sequence[int]) -> Tuning:
    _is_table("tuning", table)
    known_only("key of tuning", table, [f.name for f in dataclasses.fields(Tuning)])
    for name in ("trials", "seeds", "candidates"):
        if name not in table:
            raise ApportionError(f"tuning lacks '{name}'")
    _is_table("tuning.candidates", table["candidates"])
    numbers = seed_list("tuning.seeds", table["seeds"])
    if shared := sorted(set(numbers) & set(seeds)):
        raise ApportionError(
            f"tuning.seeds and seeds share {shared[0]}; a seed that chose the settings cannot judge them"
        )
    steps = budgets("tuning.steps", table["steps"], tasks) if "steps" in table else {}
    out = Tuning(**{**table, "seeds": numbers, "steps": steps, "candidates": tuple(table["candidates"].items())})
    for arm in arms:
        out.drawn(arm.label, arm.tune)
    return out


def _real(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < float("inf")


def _is_table(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ApportionError(f"{name} is {given!r}; it must be a table")


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ApportionError(f"{name} is {given!r}; it must be a text")
    return given


def _several(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple) or not given:
        raise ApportionError(f"{name} is {given!r}; it must be a list of at least one")
    return list(given)


def _distinct(name: str, given: Sequence[Any], way_out: str) -> tuple[Any, ...]:
    for i, x in enumerate(given):
        if x in given[:i]:
            raise ApportionError(f"{name} holds {x!r} twice; {way_out}")
    return tuple(given)


def _slug(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", task)
