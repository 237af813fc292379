"""`--set part.field=value`: values are Python literals or parts such as `LeaveOneOut()`, read without running code."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

from apportion.core import parts, update
from apportion.core.errors import ApportionError, UnknownName
from apportion.core.method import Claim, Method
from apportion.core.sampler import Sampler

PARTS: dict[str, type] = {name: getattr(parts, name) for name in parts.__all__}
PARTS |= {cls.__name__: cls for cls in (Sampler, update.Adam, update.NaturalGradient, update.ValueLoss, Claim)}
# The bases of the families cannot be built.
PARTS = {
    name: cls for name, cls in PARTS.items() if not getattr(cls, "__abstractmethods__", None) and cls != parts.Part
}


def _build(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name not in PARTS:
        raise UnknownName("part", name, PARTS)
    fields = [f.name for f in dataclasses.fields(PARTS[name])]
    for key in kwargs:
        if key not in fields:
            raise UnknownName(f"field of {name}", key, fields or ["(it has none)"])
    if len(args) > len(fields) or set(fields[: len(args)]) & set(kwargs):
        raise ApportionError(
            f"{name} takes {', '.join(fields) or 'no values'}, each once; got {len(args)} without name"
        )
    return PARTS[name](*args, **kwargs)


def _read(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_read(item, text) for item in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _read(node.operand, text)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.Name):
        # `loss` is a word, `LeaveOneOut` a part with its default values.
        return _build(node.id, [], {}) if node.id[:1].isupper() else node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = [_read(a, text) for a in node.args]
        kwargs = {k.arg: _read(k.value, text) for k in node.keywords if k.arg}
        if len(kwargs) == len(node.keywords):
            return _build(node.func.id, args, kwargs)
    raise ApportionError(
        f"cannot read '{text}'; a value is a number, a word, True, False, None or a part, e.g. Clip(0.1)"
    )


def value(text: str) -> Any:
    """The value that the text stands for.

    >>> value("0.5"), value("loss"), value("Clip(0.2, high=0.28)")
    (0.5, 'loss', Clip(low=0.2, high=0.28, dual=None))
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ApportionError(f"cannot read '{text}'; a value is a number, a word or a part, e.g. Clip(0.1)") from None
    try:
        return _read(node, text)
    except TypeError:
        raise ApportionError(f"'{text}' holds a value of the wrong type") from None


def override(text: str) -> tuple[str, Any]:
    """(path, value) of one `--set`.

    >>> override("sampler.group=4")
    ('sampler.group', 4)
    """
    path, equals, rest = text.partition("=")
    if not equals or not path.strip() or not rest.strip():
        raise ApportionError(f"--set {text!r} is not PART.FIELD=VALUE, e.g. --set sampler.group=4")
    return path.strip(), value(rest)


def apply(method: Method, overrides: list[str]) -> Method:
    """The method with every `--set` applied in order."""
    for text in overrides:
        method = method.set(*override(text))
    return method
