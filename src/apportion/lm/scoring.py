"""Calling rewards so that no function can stop a run: by an exception, a wrong value, an endless loop or a crash."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from apportion.core.errors import ApportionError
from apportion.lm.rewards import Reward

Steps = list[tuple[int, float]]


class Item(NamedTuple):
    """One completion to be scored."""

    prompt: Any
    completion: str
    columns: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Scores:
    """What the rewards say of K completions.

    value: [K F] by completion and reward function; nan where a function failed. steps: for each completion the step
    rewards, (end character, reward) in units of the weighted sum, or None. failures: how often each thing went wrong
    ("raised", "None", "not finite", "no number", "wrong length", "too slow", "died"). example: what one failure said.
    """

    value: np.ndarray
    steps: list[Steps | None]
    weight: np.ndarray
    failures: Counter[str]
    example: str = ""

    @property
    def scored(self) -> np.ndarray:
        """[K] bool: every function gave a number."""
        return np.isfinite(self.value).all(1)

    @property
    def total(self) -> np.ndarray:
        """[K] the weighted sum; 0 where not scored."""
        return np.where(self.scored, np.nan_to_num(self.value) @ self.weight, 0.0)


class Failure(NamedTuple):
    """Why a completion has no number from a function."""

    kind: str
    says: str


class _Call(NamedTuple):
    """One call of reward function number `f`, for the items `first` to `last`."""

    f: int
    first: int
    last: int


def score(rewards: Sequence[Reward], items: Sequence[Item], limit: float | None = None) -> Scores:
    """Call every reward on every item.

    limit: seconds a completion may take (a batch: times its size). The functions then run in a copy of this process
    (fork), which is ended and begun again after the call that took longer or crashed; what they change in memory is
    lost. None calls them here, for functions that keep a state or use a GPU, and trusts them to return.

    Raises ApportionError where the system has no fork.
    """
    calls = [
        _Call(f, *bounds)
        for f, reward in enumerate(rewards)
        for bounds in ([(0, len(items))] if reward.batched else [(k, k + 1) for k in range(len(items))])
        if items
    ]
    value = np.full((len(items), len(rewards)), math.nan)
    steps: list[Steps | None] = [None] * len(items)
    failures: Counter[str] = Counter()
    example = ""
    answered = _here(rewards, items, calls) if limit is None else _apart(rewards, items, calls, limit)
    for call, results in answered:
        for k, result in zip(range(call.first, call.last), results, strict=True):
            if isinstance(result, Failure):
                failures[result.kind] += 1
                example = example or f"reward {rewards[call.f].name}: {result.says}"
            elif isinstance(result, list):
                weighted = [(end, rewards[call.f].weight * number) for end, number in result]
                steps[k] = sorted((steps[k] or []) + weighted)
                value[k, call.f] = sum(number for _, number in result)
            else:
                value[k, call.f] = result
    return Scores(value, steps, np.array([r.weight for r in rewards], float), failures, example)


def _here(
    rewards: Sequence[Reward], items: Sequence[Item], calls: Sequence[_Call]
) -> Iterator[tuple[_Call, list[Any]]]:
    """(call, a number, steps or Failure for each of its items), in order, in this process."""
    for call in calls:
        yield call, _results(rewards[call.f], items[call.first : call.last])


def _results(reward: Reward, items: Sequence[Item]) -> list[Any]:
    try:
        if reward.batched:
            columns = {name: [item.columns.get(name) for item in items] for name in items[0].columns}
            spoken = {"prompts": [item.prompt for item in items], "completions": [item.completion for item in items]}
            found = list(reward(columns | spoken))
            if len(found) != len(items):
                failure = Failure("wrong length", f"returned {len(found)} values for {len(items)} completions")
                return [failure] * len(items)
            return [_number(x) for x in found]
        (item,) = items
        return [_number(reward(item.columns | {"prompt": item.prompt, "completion": item.completion}))]
    except Exception as error:  # whatever the user's function raises
        return [Failure("raised", f"{type(error).__name__}: {error}")] * len(items)


def _number(value: Any) -> float | Steps | Failure:
    """What a function returned, as a finite number or steps, or why it is neither."""
    if value is None:
        return Failure("None", "returned None")
    try:
        if isinstance(value, list | tuple):
            steps = [(int(end), float(number)) for end, number in value]
            if not steps:
                return Failure("no number", "returned no steps")
            return steps if all(math.isfinite(n) for _, n in steps) else Failure("not finite", f"returned {value!r}")
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return Failure("no number", f"returned {value!r}"[:200])
    return number if math.isfinite(number) else Failure("not finite", f"returned {number}")


def _apart(
    rewards: Sequence[Reward], items: Sequence[Item], calls: Sequence[_Call], limit: float
) -> Iterator[tuple[_Call, list[Any]]]:
    """As `_here`, in a forked process that is replaced when a call takes too long or takes it down."""
    if not hasattr(os, "fork"):
        raise ApportionError("a time limit on rewards needs fork, which this system lacks; set reward_timeout to None")
    fork = multiprocessing.get_context("fork")
    done = 0
    while done < len(calls):
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_work, args=(rewards, items, calls[done:], ours, theirs, limit))
        with warnings.catch_warnings():
            # Threads that are lost at a fork can leave the child waiting for ever; the limit is there for that too.
            warnings.simplefilter("ignore")
            child.start()
        theirs.close()
        try:
            while done < len(calls):
                call = calls[done]
                size, failure = call.last - call.first, None
                try:
                    if ours.poll(limit * size):
                        found = [
                            Failure(*r["failure"]) if isinstance(r, dict) else r for r in json.loads(ours.recv_bytes())
                        ]
                    else:
                        failure = Failure("too slow", f"took longer than {limit:g} s a completion")
                except EOFError:
                    failure = Failure("died", "ended its process")
                done += 1
                yield call, found if failure is None else [failure] * size
                if failure is not None:
                    break
        finally:
            ours.close()
            child.kill()
            child.join()


def _work(
    rewards: Sequence[Reward],
    items: Sequence[Item],
    calls: Sequence[_Call],
    theirs: Connection,
    ours: Connection,
    limit: float,
) -> None:
    """The forked process: results of each call as one message of JSON."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for call in calls:
        # Should the parent be killed in the meantime, nobody else would end a call that never returns.
        signal.setitimer(signal.ITIMER_REAL, limit * (call.last - call.first) + 1)
        results = _results(rewards[call.f], items[call.first : call.last])
        told = [{"failure": list(r)} if isinstance(r, Failure) else r for r in results]
        ours.send_bytes(json.dumps(told).encode())
