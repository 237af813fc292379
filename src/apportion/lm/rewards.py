"""Rewards of completions: any Python function, several with weights, or the rules that are known by name.

A reward function that fails costs a run one number, not the run: the sibling is unscored and leaves its group's
baseline. `lm.scoring` calls them.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from apportion.core.errors import ApportionError, UnknownName

NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")
THINK = re.compile(
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*", re.S
)


@dataclass(frozen=True)
class Reward:
    """A reward function with its weight in the sum and the name that metrics call it by.

    function: called by keyword with what its parameters name: `prompt`, `completion` and columns of the data for one
    completion at a time, or `prompts`, `completions` and columns, each a list, for a batch. It returns a number (a list
    of numbers for a batch), or for one completion a list of (end, reward) steps, where a step ends before that
    character of the completion. Raises ApportionError for a signature that cannot be called so.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ApportionError(
                f"reward {self.function!r} is no function; give a function or one of {', '.join(RULES)}"
            )
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float) or not np.isfinite(self.weight):
            raise ApportionError(f"the weight of reward {self.name} is {self.weight!r}; it must be a finite number")
        names = self._parameters()
        if ("completion" in names) == ("completions" in names):
            raise ApportionError(
                f"reward {self.name} has the parameters ({', '.join(names)}); it must take `completion` (one at a "
                "time) or `completions` (a batch), and may take prompt or prompts and columns of the data"
            )

    def _parameters(self) -> dict[str, inspect.Parameter]:
        try:
            found = dict(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            raise ApportionError(f"reward {self.name} hides its parameters; wrap it in a function") from None
        for name, p in found.items():
            if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
                raise ApportionError(
                    f"reward {self.name} takes `{name}` by position only; rewards are called by keyword"
                )
        return found

    @property
    def batched(self) -> bool:
        """Whether it takes a batch at a time."""
        return "completions" in self._parameters()

    def check(self, columns: Iterable[str]) -> None:
        """Refuse a function that needs what is neither prompt, completion nor a column of the data."""
        given = {"prompts", "completions", *columns} if self.batched else {"prompt", "completion", *columns}
        for name, p in self._parameters().items():
            if p.kind != p.VAR_KEYWORD and p.default is p.empty and name not in given:
                raise ApportionError(
                    f"reward {self.name} needs `{name}`, which the data lacks; its columns: "
                    f"{', '.join(sorted(columns)) or 'none but the prompt'}"
                )

    def __call__(self, arguments: dict[str, Any]) -> Any:
        """What the function returns, given those of the arguments that it takes."""
        parameters = self._parameters()
        if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            return self.function(**arguments)
        return self.function(**{k: v for k, v in arguments.items() if k in parameters})


def rewards(source: Any) -> tuple[Reward, ...]:
    """The rewards that `source` names: a function, a Reward, text (see `named`), or a list of these.

    >>> [(r.name, r.weight) for r in rewards(["accuracy", "format=0.2"])]
    [('accuracy', 1.0), ('format', 0.2)]
    """
    sources = list(source) if isinstance(source, Sequence) and not isinstance(source, str) else [source]
    found = tuple(named(s) if isinstance(s, str) else s if isinstance(s, Reward) else Reward(s) for s in sources)
    if not found:
        raise ApportionError(f"there is no reward; give a function or one of {', '.join(RULES)}")
    names = [r.name for r in found]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise ApportionError(f"two rewards are called {twice}; give one another name: Reward(function, name=...)")
    return found


def named(text: str) -> Reward:
    """The reward of a specification: a rule's name or `file.py:function`, with `=WEIGHT` after it if it is not 1.

    Raises ApportionError for what does not exist or cannot be loaded.
    """
    head, equals, tail = text.rpartition("=")
    weight = 1.0
    if equals:
        try:
            text, weight = head, float(tail)
        except ValueError:
            raise ApportionError(f"reward '{text}': the weight '{tail}' is no number; write e.g. format=0.2") from None
    path, colon, name = text.rpartition(":")
    if colon:
        return Reward(_function(Path(path), name), weight)
    if text not in RULES:
        raise UnknownName("reward", text, [*RULES, "FILE.py:FUNCTION"])
    if text == "math_verify" and importlib.util.find_spec(text) is None:
        raise ApportionError("reward math_verify needs the package math-verify: pip install math-verify")
    return Reward(RULES[text], weight, text)


def _function(path: Path, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.exists():
        raise ApportionError(f"there is no Python file {path}; a reward is given as FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise ApportionError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise UnknownName(f"function of {path}", name, [n for n in vars(module) if not n.startswith("_")])
    return getattr(module, name)


# --- the rules


def _value(text: Any) -> Decimal | str:
    """A number where the text is one, else the text without outer blanks and case."""
    stripped = str(text).strip().strip("$").rstrip(".").replace("−", "-")
    try:
        number = Decimal(stripped.replace(",", ""))
    except InvalidOperation:
        return stripped.casefold()
    return number if number.is_finite() else stripped.casefold()


def last_number(completion: str, answer: Any) -> float:
    """1 when the last number of the completion is the answer.

    >>> last_number("3 + 4 = 7.", "7"), last_number("so -2", "-2"), last_number("5-2", "2"), last_number("none", "2")
    (1.0, 1.0, 1.0, 0.0)
    """
    found = NUMBER.findall(completion.replace("−", "-"))
    return float(bool(found) and _value(found[-1]) == _value(answer))


def accuracy(completion: str, answer: Any) -> float:
    r"""1 when the last <answer>...</answer> or \boxed{...} holds the answer.

    Source: DeepSeek-AI 2025 (R1), section 2.2.2.

    >>> accuracy("<think>3+4</think> <answer>7.0</answer>", "7"), accuracy("7", "7")
    (1.0, 0.0)
    """
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.S) or re.findall(r"\\boxed\{([^{}]*)\}", completion)
    return float(bool(found) and _value(found[-1]) == _value(answer))


def format_(completion: str) -> float:
    """1 when the completion is <think>...</think><answer>...</answer>. Source: DeepSeek-AI 2025 (R1), section 2.2.2.

    >>> format_("<think>a</think>\\n<answer>b</answer>"), format_("<answer>b</answer>")
    (1.0, 0.0)
    """
    return float(THINK.fullmatch(completion) is not None)


def math_verify(completion: str, answer: Any) -> float | None:
    """1 when the completion's mathematics equals the answer's, by the package math-verify; None if there is none."""
    from math_verify import parse, verify

    gold = parse(str(answer)) or parse(f"${answer}$")
    return float(verify(gold, parse(completion))) if gold else None


def task(completion: str, verifier: Callable[[str], float]) -> float:
    """The score that the reasoning-gym task itself gives to the last <answer>...</answer>, or else to all."""
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.S)
    return verifier((found[-1] if found else completion).strip())


RULES: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy,
    "format": format_,
    "last_number": last_number,
    "math_verify": math_verify,
    "task": task,
}
"""Rewards by name."""


def overlong(length: np.ndarray, limit: int, cache: int) -> np.ndarray:
    """Soft punishment of long responses, added to the reward: 0, then a slope down to -1 over the last `cache` tokens.

    length: response lengths in tokens, any shape. limit: the longest response allowed (L_max). Source: Yu et al. 2025
    (DAPO), eq. 13.

    >>> overlong(np.array([5, 6, 8, 10, 11]), limit=10, cache=4).tolist()
    [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    return np.clip((limit - cache - length) / cache, -1.0, 0.0)
