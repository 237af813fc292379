"""What every part of a method is: a frozen dataclass with one equation, a source, and the lines it reduces to."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from abc import ABC
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from apportion.core.errors import InvalidMethod

Scope = Literal["trajectory", "group", "batch"]


@dataclass(frozen=True)
class Part(ABC):
    """A named piece of q or w.

    equation: the formula, in the symbols of the method's card.
    source: paper and equation, or "unstated".
    scope: whose data one sibling's weight depends on. "batch" parts couple all rows, so that no enumeration of
        single groups is exact; the audit then speaks of the large-batch limit.
    affine: the advantage is an affine function of the siblings' rewards, so its expectation needs only their means.
    """

    equation: ClassVar[str] = ""
    source: ClassVar[str] = "unstated"
    scope: ClassVar[Scope] = "trajectory"
    affine: ClassVar[bool] = True

    def replace(self, **changes: Any) -> Any:
        """The same part with other values."""
        return dataclasses.replace(self, **changes)

    def flat(self) -> list[str]:
        """The lines of NumPy that this part reduces to, as `apportion methods NAME --flat` prints them."""
        return []

    def _require(self, field: str, ok: bool, rule: str) -> None:
        if not ok:
            raise InvalidMethod(f"{type(self).__name__}.{field} is {getattr(self, field)!r}; it must be {rule}")


def check_types(part: Any, where: str) -> None:
    """See that every field of a part holds what it is declared to hold, and no number is infinite or NaN.

    Raises InvalidMethod naming the first field that does not.
    """
    for name, kind in _declared(part.__class__).items():
        value = getattr(part, name)
        if not _is(value, kind):
            raise InvalidMethod(f"{where}.{name} is {value!r}; it must be {_words(kind)}")
        if dataclasses.is_dataclass(value):
            check_types(value, f"{where}.{name}")


@cache
def _declared(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _is(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_is(value, k) for k in get_args(kind))
    if origin is Literal:
        return any(value is k or (type(value) is type(k) and value == k) for k in get_args(kind))
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType, Literal):
        return " or ".join(_words(k) for k in get_args(kind))
    words = {float: "a finite number", int: "a whole number", bool: "True or False", types.NoneType: "None"}
    return words[kind] if kind in words else kind.__name__ if isinstance(kind, type) else repr(kind)
