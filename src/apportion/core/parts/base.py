"""What every part of a method is: a frozen dataclass with one equation, a source, and the lines it reduces to."""

from __future__ import annotations

import dataclasses
from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
