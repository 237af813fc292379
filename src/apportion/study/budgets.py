"""What a run may spend: environment steps in control; completions or response tokens of a language model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from apportion.core.errors import ApportionError
from apportion.study.checks import known_only, whole


class Unit(NamedTuple):
    """words: its name in a sentence. counter: the field of a run's log rows that counts it."""

    words: str
    counter: str


UNITS = {
    "steps": Unit("environment steps", "env_steps"),
    "completions": Unit("completions", "completions"),
    "tokens": Unit("response tokens", "tokens"),
}
"""What budgets count, by the key of a study file and column of its table."""
CONTROL, LANGUAGE = ("steps",), ("completions", "tokens")


class Budget(NamedTuple):
    """So many of a unit.

    >>> str(Budget("steps", 60_000))
    '60,000 environment steps'
    """

    unit: str
    amount: int

    def __str__(self) -> str:
        return f"{self.amount:,} {UNITS[self.unit].words}"


def total(spent: Iterable[Budget]) -> str:
    """Budgets added up, those of each unit.

    >>> total([Budget("steps", 500), Budget("tokens", 8), Budget("steps", 1500)])
    '2,000 environment steps, 8 response tokens'
    """
    sums = dict.fromkeys(UNITS, 0)
    for unit, amount in spent:
        sums[unit] += amount
    return ", ".join(str(Budget(unit, amount)) for unit, amount in sums.items() if amount)


def budgets(given: Mapping[str, Any], tasks: Sequence[str], lm: Collection[str], where: str = "") -> dict[str, Budget]:
    """The budget of each task that has one.

    given: by unit, a number for all tasks that it fits, a table by task, or None. lm: those of the tasks that are
    language models'. where: the table that holds the keys, such as "tuning.", for messages. Raises ApportionError.
    """
    out: dict[str, Budget] = {}
    for unit, amounts in given.items():
        if amounts is None:
            continue
        name, words = where + unit, UNITS[unit].words
        fits = [task for task in tasks if unit in kind(task, lm)]
        by_task = amounts if isinstance(amounts, Mapping) else dict.fromkeys(fits or tasks, amounts)
        known_only(f"task in {name}", by_task, tasks)
        for task, amount in by_task.items():
            if task not in fits:
                raise ApportionError(f"{name} is {amount!r} for {task}, but {_told(task, lm)}")
            if task in out:
                raise ApportionError(
                    f"{name} is {amount!r} for {task}, which has {out[task].unit} = {out[task].amount} already; "
                    "give one of the two"
                )
            if not whole(amount) or amount < 1:
                raise ApportionError(
                    f"{name} is {amount!r} for {task}; it must be a whole number of {words}, 1 or more"
                )
            out[task] = Budget(unit, amount)
    return out


def every(given: Mapping[str, Any], tasks: Sequence[str], lm: Collection[str]) -> dict[str, Budget]:
    """As `budgets`, and every task has one."""
    out = budgets(given, tasks, lm)
    for task in tasks:
        if task in out:
            continue
        if all(given.get(unit) is None for unit in kind(task, lm)):
            raise ApportionError(f"the study lacks '{kind(task, lm)[0]}': {_told(task, lm)}")
        raise ApportionError(f"no number for {task}: {_told(task, lm)}")
    return out


def kind(task: str, lm: Collection[str]) -> tuple[str, ...]:
    """The units that a task's budget may have."""
    return LANGUAGE if task in lm else CONTROL


def _told(task: str, lm: Collection[str]) -> str:
    if task in lm:
        return f"{task} is a language-model task; give its budget as completions or as tokens"
    return f"{task} is a control task, as there is no table [lm.{task}]; give its budget as steps (environment steps)"


def plain(by_task: Mapping[str, Budget]) -> dict[str, dict[str, int]]:
    """Budgets as study.json holds them and a study file may: by unit, then by task; steps even where there are none."""
    units = {unit: {task: b.amount for task, b in by_task.items() if b.unit == unit} for unit in UNITS}
    return {unit: amounts for unit, amounts in units.items() if amounts or unit == "steps"}


def recorded(record: Mapping[str, Any]) -> dict[str, Budget]:
    """The budget of each task, from what `plain` left in study.json.

    >>> recorded({"steps": {}, "completions": {"sums": 64}})
    {'sums': Budget(unit='completions', amount=64)}
    """
    return {task: Budget(unit, amount) for unit in UNITS for task, amount in record.get(unit, {}).items()}
