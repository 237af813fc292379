"""Prompts: where they come from, in which order a run draws them, and the token ids that a model is given.

A dataset is rows by number; a run draws them in an order that the seed and the epoch decide, so that one number, the
position, is all that a checkpoint needs.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from apportion.core.errors import ApportionError, UnknownName

Prompt = str | list[dict[str, str]]
"""Text, or chat messages such as {"role": "user", "content": "..."}."""

GENERATED = 10_000
"""Rows of a generated dataset whose specification names no size."""

KINDS = "reasoning_gym:NAME?option=value, a .jsonl file, or hf:NAME?split=train"


@dataclass(frozen=True)
class Example:
    """One row: the prompt, and the other columns, which rewards read by name."""

    prompt: Prompt
    columns: dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """Rows by number, each a mapping with the prompt under `column`.

    name: how errors call it. rows: anything with a length and an index: a list, a `datasets.Dataset`.
    keep: which rows are used, in order; None for all.

    >>> data = Dataset("mine", [{"prompt": "1+1=", "answer": "2"}])
    >>> data[0]
    Example(prompt='1+1=', columns={'answer': '2'})
    """

    name: str
    rows: Any
    column: str = "prompt"
    keep: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.keep is None else len(self.keep)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Example:
        """The row. Raises ApportionError when it has no prompt, or one that is neither text nor messages."""
        row = self.rows[index if self.keep is None else self.keep[index]]
        if not isinstance(row, Mapping):
            raise ApportionError(f"row {index} of {self.name} is {row!r}; it must map columns to values")
        if self.column not in row:
            raise UnknownName(f"column of {self.name}", self.column, row)
        prompt = row[self.column]
        spoken = isinstance(prompt, list) and all(
            isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt
        )
        if not (isinstance(prompt, str) or (spoken and prompt)):
            raise ApportionError(
                f"the prompt of row {index} of {self.name} is {prompt!r}; it must be text or a list of messages "
                "with role and content"
            )
        return Example(prompt, {k: v for k, v in row.items() if k != self.column})

    def without(self, other: Dataset) -> Dataset:
        """The rows whose prompt is not one of the other dataset's. Raises ApportionError when none is left.

        >>> ab, b = Dataset("ab", [{"prompt": "a"}, {"prompt": "b"}]), Dataset("b", [{"prompt": "b"}])
        >>> [example.prompt for example in ab.without(b)]
        ['a']
        """
        seen = {json.dumps(example.prompt) for example in other}
        left = tuple(i for i in range(len(self)) if json.dumps(self[i].prompt) not in seen)
        if not left:
            raise ApportionError(f"every prompt of {self.name} is also in {other.name}; give other evaluation data")
        return self if len(left) == len(self) else dataclasses.replace(self, keep=left)

    def first(self, count: int) -> Dataset:
        """The first rows, at most `count`."""
        keep = tuple(range(len(self)))[:count] if self.keep is None else self.keep[:count]
        return dataclasses.replace(self, keep=keep)


def draw(size: int, seed: int, position: int, count: int) -> list[int]:
    """Row numbers at `position`, `position + 1`, ... of the endless shuffled order: each epoch all rows, once.

    >>> sorted(draw(4, seed=0, position=0, count=4)), draw(4, 0, 2, 3) == draw(4, 0, 0, 5)[2:]
    ([0, 1, 2, 3], True)
    """
    return [int(_order(size, seed, p // size)[p % size]) for p in range(position, position + count)]


@functools.lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)


def dataset(source: Any) -> Dataset:
    """The dataset that a specification names, or that an object is.

    source: a Dataset; rows (a list of mappings or of texts, a `datasets.Dataset`); or text: `reasoning_gym:NAME`, a
    `.jsonl` file, `hf:NAME`. Options follow a question mark: those of the reasoning-gym task (and size, seed); for the
    others `prompt` names the prompt's column and `answer` the column that rewards shall read as `answer`; `hf:` also
    takes split and config.

    Raises ApportionError for what does not exist, is empty or cannot be read.

    >>> dataset([{"prompt": "1+1=", "answer": "2"}])[0].columns
    {'answer': '2'}
    """
    if isinstance(source, Dataset):
        found = source
    elif isinstance(source, str | Path):
        found = _named(str(source))
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, Mapping):
        rows = (
            [{"prompt": row} if isinstance(row, str) else row for row in source] if isinstance(source, list) else source
        )
        found = Dataset("the data", rows)
    else:
        raise ApportionError(
            f"data is {type(source).__name__}; it must be rows (a list, a datasets.Dataset) or {KINDS}"
        )
    if len(found) == 0:
        raise ApportionError(f"{found.name} has no rows")
    found[0]
    return found


def _named(text: str) -> Dataset:
    base, _, query = text.partition("?")
    options = {key: _literal(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    kind, colon, name = base.partition(":")
    if colon and kind == "reasoning_gym":
        return _generated(text, name, options)
    if colon and kind == "hf":
        return _columns(text, *_hugging_face(text, name, options))
    if base.endswith(".jsonl"):
        return _columns(text, _lines(Path(base)), options)
    raise ApportionError(f"data '{text}' is of no known kind; give {KINDS}")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class _Tasks:
    """The entries of a reasoning-gym task, each with its own verifier."""

    generator: Any

    def __len__(self) -> int:
        return len(self.generator)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.generator[index]
        verify: Callable[[str | None], float] = functools.partial(self.generator.score_answer, entry=entry)
        return {
            "prompt": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "verifier": verify,
        }


def _generated(text: str, name: str, options: dict[str, Any]) -> Dataset:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ApportionError(f"data '{text}' needs the package reasoning-gym: pip install reasoning-gym") from None
    if name not in DATASETS:
        raise UnknownName("reasoning-gym task", name, DATASETS)
    known = [f.name for f in dataclasses.fields(DATASETS[name][1])]
    for key in options:
        if key not in known:
            raise UnknownName(f"option of reasoning-gym task {name}", key, known)
    try:
        generator = reasoning_gym.create_dataset(name, **{"size": GENERATED, "seed": 0} | options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ApportionError(f"data '{text}': {error or 'the task refuses these options'}") from error
    return Dataset(text, _Tasks(generator))


def _hugging_face(text: str, name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise ApportionError(f"data '{text}' needs the package datasets: pip install datasets") from None
    split, config = options.pop("split", "train"), options.pop("config", None)
    try:
        return datasets.load_dataset(name, config, split=split), options
    except Exception as error:  # network, hub and parser each raise their own
        raise ApportionError(
            f"cannot load data '{text}': {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


def _lines(path: Path) -> list[Any]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ApportionError(f"cannot read data {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ApportionError(f"line {number} of {path} is no JSON ({error}); one object a line") from error
    return rows


@dataclass(frozen=True)
class _Renamed:
    """Rows with one column under another name as well."""

    rows: Any
    column: str
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.column not in row:
            raise UnknownName("column", self.column, row)
        return dict(row) | {self.name: row[self.column]}


def _columns(text: str, rows: Any, options: dict[str, Any]) -> Dataset:
    for key in options:
        if key not in ("prompt", "answer"):
            raise UnknownName(f"option of data '{text}'", key, ["prompt", "answer", "split", "config"])
    answer = options.get("answer", "answer")
    return Dataset(
        text, rows if answer == "answer" else _Renamed(rows, answer, "answer"), options.get("prompt", "prompt")
    )


@dataclass(frozen=True)
class Prompter:
    """From a prompt to the token ids that the model continues.

    tokenizer: the model's. system: put before every prompt as a system message. plain: give text as it is, without the
    chat template. limit: the most tokens a prompt may have (the context less the response), None for any.
    Raises ApportionError when a system prompt is given and there is no chat template to carry it.
    """

    tokenizer: Any
    system: str | None = None
    plain: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            why = "plain is set" if self.plain else "this model has no chat template"
            raise ApportionError(f"a system prompt needs a chat template, but {why}; put it into the prompts")

    @property
    def chat(self) -> bool:
        """Whether prompts go through the chat template."""
        return not self.plain and getattr(self.tokenizer, "chat_template", None) is not None

    def text(self, prompt: Prompt) -> str:
        """The text whose tokens are the prompt. Raises ApportionError for messages that no template takes."""
        if not self.chat:
            if isinstance(prompt, str):
                return prompt
            why = "plain is set" if self.plain else "this model has no chat template"
            raise ApportionError(f"a prompt of messages needs a chat template, but {why}; give prompts as text")
        messages: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like
            raise ApportionError(f"the chat template refuses {list(messages)!r}: {error}") from error

    def ids(self, prompt: Prompt) -> np.ndarray:
        """[T] token ids. Raises ApportionError when there are none, or more than the limit."""
        ids = np.asarray(self.tokenizer(self.text(prompt), add_special_tokens=not self.chat)["input_ids"], np.int64)
        shown = (prompt if isinstance(prompt, str) else prompt[-1]["content"])[:60]
        if ids.size == 0:
            raise ApportionError(f"the prompt {shown!r} has no tokens")
        if self.limit is not None and ids.size > self.limit:
            raise ApportionError(
                f"the prompt {shown!r}... has {ids.size:,} tokens; the model's context leaves room for {self.limit:,} "
                "beside the response; shorten it, drop such rows, or lower the response's limit (--max-tokens)"
            )
        return ids
