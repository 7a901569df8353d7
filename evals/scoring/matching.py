"""Match JSON patterns against JSON values.

A literal equals a value of the same type (`"20"` is not 20, `true` is not 1; 20 and 20.0 are the same number). An
object matches if each of its keys does; additional keys in the value are ignored. A list matches element by element.
`"$name"` binds the value, and every later `"$name"` must equal it; `"$$x"` is the literal `$x`. An object can also
contain operators:

    @in [..]  @not p  @le @lt @ge @gt number  @re "search"  @text "search in all strings inside"
    @exists bool  @len p (pattern of the length)  @has p (some element matches)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from evals.transcripts.canonical import Call

Env = Mapping[str, Any]
_MISSING: Final = object()
_KEYS: Final = frozenset({"tool", "server", "args", "result", "ok", "shell", "agent"})


@lru_cache(maxsize=1024)
def regex(text: str) -> re.Pattern[str]:
    """Compile a case-insensitive regular expression in which `.` does not match a newline."""
    return re.compile(text, re.IGNORECASE)


def same(a: Any, b: Any) -> bool:
    """Return whether JSON values are equal. At any depth, values of different JSON types are never equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if _number(a) and _number(b):
        return bool(a == b)
    return type(a) is type(b) and bool(a == b)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def match(pattern: Any, value: Any, env: Env) -> Env | None:
    """Return the bindings after a match, or None. Only `@exists` matches a key missing from an object."""
    if isinstance(pattern, str):
        return _match_text(pattern, value, env)
    if isinstance(pattern, dict):
        if any(key.startswith("@") for key in pattern):
            for name, operand in pattern.items():
                bound = OPERATORS[name](operand, value, env)
                if bound is None:
                    return None
                env = bound
            return env
        if not isinstance(value, dict):
            return None
        return _match_all(((part, value.get(key, _MISSING)) for key, part in pattern.items()), env)
    if isinstance(pattern, list):
        if not isinstance(value, list) or len(value) != len(pattern):
            return None
        return _match_all(zip(pattern, value, strict=True), env)
    return env if value is not _MISSING and same(pattern, value) else None


def _match_text(pattern: str, value: Any, env: Env) -> Env | None:
    """Match a literal string, bind a `$name`, or compare a value with the one bound to the name."""
    if value is _MISSING:
        return None
    if not pattern.startswith("$"):
        return env if value == pattern and isinstance(value, str) else None
    if pattern.startswith("$$"):
        return env if value == pattern[1:] else None
    if pattern in env:
        return env if same(env[pattern], value) else None
    # Two missing ids are not evidence that the ids are equal.
    return None if value is None or value == "" else {**env, pattern: value}


def _match_all(pairs: Iterable[tuple[Any, Any]], env: Env) -> Env | None:
    """Match every pair of (pattern, value) with one set of bindings."""
    for part, value in pairs:
        bound = match(part, value, env)
        if bound is None:
            return None
        env = bound
    return env


def _when(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any, Env], Env | None]:
    return lambda operand, value, env: env if test(operand, value) else None


def _ordered(test: Callable[[float, float], bool]) -> Callable[[Any, Any, Env], Env | None]:
    return _when(lambda limit, value: _number(value) and math.isfinite(value) and test(value, limit))


def _has(operand: Any, value: Any, env: Env) -> Env | None:
    """Return the bindings of the first element that matches."""
    found = (match(operand, v, env) for v in value) if isinstance(value, list) else iter(())
    return next((bound for bound in found if bound is not None), None)


def strings(value: Any) -> Iterator[str]:
    """Yield all strings inside a value, keys included."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, str):
            yield top
        elif isinstance(top, dict):
            stack += [*top.keys(), *top.values()]
        elif isinstance(top, list):
            stack += top


OPERATORS: Final[dict[str, Callable[[Any, Any, Env], Env | None]]] = {
    "@in": _when(lambda options, value: any(same(o, value) for o in options)),
    "@not": lambda operand, value, env: env if match(operand, value, env) is None else None,
    "@le": _ordered(lambda value, limit: value <= limit),
    "@lt": _ordered(lambda value, limit: value < limit),
    "@ge": _ordered(lambda value, limit: value >= limit),
    "@gt": _ordered(lambda value, limit: value > limit),
    "@re": _when(lambda text, value: isinstance(value, str) and regex(text).search(value) is not None),
    "@text": _when(lambda text, value: any(regex(text).search(s) for s in strings(value))),
    "@exists": _when(lambda wanted, value: (value is not _MISSING) is wanted),
    "@len": lambda operand, value, env: (
        match(operand, len(value), env) if isinstance(value, (str, list, dict)) else None
    ),
    "@has": _has,
}


def match_call(pattern: dict[str, Any], call: Call, env: Env, *, ok: bool | None = None) -> Env | None:
    """Return the bindings if a call matches a pattern, otherwise None.

    `ok` is the required outcome if the pattern does not specify one.
    """
    tool = pattern.get("tool")
    if tool.__class__ is str and tool != call.tool and tool[:1] != "$":
        return None  # a shortcut, because most calls in a session do not match
    wanted = pattern.get("ok", ok)
    if wanted is not None and call.ok is not wanted:
        return None
    if "shell" in pattern:
        command = call.command
        return None if command is None else match({"@re": pattern["shell"]}, command, env)
    if not (call.ours if "server" not in pattern else match(pattern["server"], call.server, {}) is not None):
        return None
    bound = match(tool, call.tool, env)
    for key, value in (("args", call.args), ("result", call.result), ("agent", call.agent)):
        if bound is not None and key in pattern:
            bound = match(pattern[key], value, bound)
    return bound


def faults(pattern: Any) -> Iterator[str]:
    """List the errors in a value pattern: unknown operators, invalid expressions, operators mixed with plain keys."""
    if isinstance(pattern, list):
        for part in pattern:
            yield from faults(part)
    elif isinstance(pattern, dict):
        tests = [key for key in pattern if key.startswith("@")]
        if tests and len(tests) != len(pattern):
            yield f"operators and plain keys in one object: {sorted(pattern)}"
        for key, part in pattern.items():
            yield from _operator_faults(key, part) if key.startswith("@") else faults(part)


def _operator_faults(name: str, operand: Any) -> Iterator[str]:
    """List the errors in one operator and its operand."""
    if name not in OPERATORS:
        yield f"unknown operator {name}; the operators are {' '.join(OPERATORS)}"
    elif name in ("@re", "@text"):
        yield from regex_faults(operand)
    elif name == "@in":
        yield from () if isinstance(operand, list) and operand else ("@in needs a non-empty list",)
    elif name == "@exists":
        yield from () if isinstance(operand, bool) else ("@exists needs true or false",)
    elif name in ("@le", "@lt", "@ge", "@gt"):
        yield from () if _number(operand) else (f"{name} needs a number",)
    else:
        yield from faults(operand)


def regex_faults(text: Any) -> Iterator[str]:
    """Describe the errors in a regular expression."""
    try:
        regex(text)
    except (re.error, TypeError) as error:
        yield f"{text!r} is not a regular expression: {error}"


def call_faults(pattern: Any) -> Iterator[str]:
    """List the errors in a call pattern."""
    if not isinstance(pattern, dict):
        yield f"a call pattern must be an object, not {pattern!r}"
        return
    for key in sorted(pattern.keys() - _KEYS):
        yield f"a call pattern can't have the key {key!r}; its keys are {', '.join(sorted(_KEYS))}"
    if ("tool" in pattern) == ("shell" in pattern):
        yield "a call pattern must name either a tool or a shell expression"
    if "shell" in pattern:
        yield from regex_faults(pattern["shell"])
    for key in ("tool", "server", "args", "result", "agent"):
        yield from faults(pattern.get(key))
