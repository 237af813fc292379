"""What a study's values must be, each refused in one line that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apportion.core.errors import ApportionError, UnknownName


def known_only(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UnknownName for the first name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UnknownName(where, name, known)


def whole(x: Any) -> bool:
    """Whether x is an int and no bool."""
    return isinstance(x, int) and not isinstance(x, bool)


def real(x: Any) -> bool:
    """Whether x is a finite number."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < float("inf")


def is_table(name: str, given: Any) -> None:
    """Raises ApportionError for what is no table."""
    if not isinstance(given, Mapping):
        raise ApportionError(f"{name} is {given!r}; it must be a table")


def text(name: str, given: Any) -> str:
    """A text that says something."""
    if not isinstance(given, str) or not given.strip():
        raise ApportionError(f"{name} is {given!r}; it must be a text")
    return given


def several(name: str, given: Any) -> list[Any]:
    """A list of at least one."""
    if not isinstance(given, list | tuple) or not given:
        raise ApportionError(f"{name} is {given!r}; it must be a list of at least one")
    return list(given)


def distinct(name: str, given: Sequence[Any], way_out: str) -> tuple[Any, ...]:
    """The values, none of them twice."""
    for i, x in enumerate(given):
        if x in given[:i]:
            raise ApportionError(f"{name} holds {x!r} twice; {way_out}")
    return tuple(given)
