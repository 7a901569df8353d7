"""Compute with known and unknown values.

`UNKNOWN` is neither true nor false, and does not equal any value. It is different from None, which is a known value. An
operation on `UNKNOWN` returns `UNKNOWN` unless the other operand alone determines the result. Callers use `truth`,
which has three results, and never Python's `bool`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

_LONG = 4_000  # characters and elements
_DIGITS = 256  # the maximum number of bits in a computed number
_BASE, _POWER = 1_000, 64
_NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARES: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.Is: operator.eq,
    ast.NotEq: operator.ne,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Unknowable(Enum):
    """The unknown value."""

    UNKNOWN = "unknown"


UNKNOWN = Unknowable.UNKNOWN


def truth(value: Any) -> bool | None:
    """Return whether a value counts as true in a condition, or None if unknown."""
    return None if value is UNKNOWN else bool(value)


def known(value: Any) -> bool:
    """Return true if a value and all its elements are known."""
    if isinstance(value, list):
        return all(map(known, value))
    if isinstance(value, dict):
        return all(map(known, value.values()))
    return value is not UNKNOWN


def same(values: Sequence[Any]) -> Any:
    """Return the value if all values are equal, otherwise UNKNOWN."""
    if not values or not all(map(known, values)):
        return values[0] if len(values) == 1 else UNKNOWN
    first = values[0]
    return first if all(type(v) is type(first) and v == first for v in values) else UNKNOWN


def bounded(value: Any) -> Any:
    """Return a value, or UNKNOWN if it is too large to compute with."""
    if isinstance(value, str | list | dict) and len(value) > _LONG:
        return UNKNOWN
    if isinstance(value, int) and value.bit_length() > _DIGITS:
        return UNKNOWN
    return value


def arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of an operator on numbers, strings, lists, dicts and paths."""
    if isinstance(left, str) and isinstance(right, str):
        if isinstance(op, ast.Add):
            return left + right
        if isinstance(op, ast.Div):  # a path
            return right if right.startswith("/") else f"{left.rstrip('/')}/{right}"
        return UNKNOWN
    if isinstance(left, list) and isinstance(right, list) and isinstance(op, ast.Add):
        return left + right
    if isinstance(left, dict) and isinstance(right, dict) and isinstance(op, ast.BitOr):
        return left | right
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return UNKNOWN
    if isinstance(op, ast.Pow) and (abs(left) > _BASE or abs(right) > _POWER):
        return UNKNOWN
    try:
        result = _NUMBERS.get(type(op), _no_result)(left, right)
    except (ArithmeticError, ValueError):
        return UNKNOWN
    return result if isinstance(result, int | float) else UNKNOWN


def _no_result(*_: Any) -> Any:
    return UNKNOWN


def unary(op: ast.unaryop, value: Any) -> Any:
    """Return the result of `not`, `-` and `+`."""
    if isinstance(op, ast.Not):
        true = truth(value)
        return UNKNOWN if true is None else not true
    if isinstance(value, int | float):
        return -value if isinstance(op, ast.USub) else +value if isinstance(op, ast.UAdd) else UNKNOWN
    return UNKNOWN


def either(values: Sequence[Any], *, stops: bool) -> Any:
    """Return the value of `or`, which stops at a true operand, or of `and`, which stops at a false operand."""
    for value in values:
        true = truth(value)
        if true is None or true is stops:
            return value
    return values[-1]


def decided(truths: Sequence[bool | None], *, stops: bool) -> bool | None:
    """Return the result of `or` or `and` for several truth values. A later value may determine the result even if an
    earlier one is unknown.
    """
    return stops if stops in truths else None if None in truths else not stops


def compared(op: ast.cmpop, left: Any, right: Any) -> Any:
    """Return the result of one comparison."""
    if isinstance(op, ast.Is | ast.IsNot) and right is None and left is not UNKNOWN:
        return (left is None) is isinstance(op, ast.Is)
    if isinstance(op, ast.In | ast.NotIn):
        found = contained(right, left)
        return found if found is UNKNOWN else found is isinstance(op, ast.In)
    if not (known(left) and known(right)):
        return UNKNOWN
    try:
        return _COMPARES.get(type(op), _no_result)(left, right)
    except TypeError:
        return UNKNOWN


def contained(container: Any, item: Any) -> Any:
    """Return the result of `in`."""
    if not known(item):
        return UNKNOWN
    if isinstance(container, str):
        return item in container if isinstance(item, str) else UNKNOWN
    if isinstance(container, dict):
        return item in container if isinstance(item, str | int | None) else UNKNOWN
    if isinstance(container, list):
        if any(known(v) and v == item for v in container):
            return True
        return False if known(container) else UNKNOWN
    return UNKNOWN


_TEXT: dict[str, Callable[..., Any]] = {
    name: getattr(str, name)
    for name in (
        *("lower", "upper", "strip", "lstrip", "rstrip", "title", "capitalize", "startswith", "endswith", "replace"),
        *("removeprefix", "removesuffix", "split", "rsplit", "join", "isdigit"),
    )
}


def text_method(text: str, name: str, args: Sequence[Any]) -> Any:
    """Return the result of a string method with known arguments."""
    given = [tuple(a) if isinstance(a, list) and name in {"startswith", "endswith"} else a for a in args]
    if name not in _TEXT or not known(list(args)):
        return UNKNOWN
    try:
        return _TEXT[name](text, *given)
    except (TypeError, ValueError, OverflowError, MemoryError):
        return UNKNOWN
