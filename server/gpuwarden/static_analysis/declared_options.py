"""Read the options that a program declares and their values on its command line."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuwarden.static_analysis.three_valued import UNKNOWN

_FIELD = frozenset({"field", "Field", "Option", "Argument"})  # calls that take the default as an argument
_FLAGS = {"store_true": False, "store_false": True}


@dataclass(frozen=True)
class Option:
    """One declared option: its flags on the command line, and its default as an expression.

    `fixed` is the default if `default` is None; UNKNOWN if the option is required.
    """

    words: tuple[str, ...] = ()
    default: ast.expr | None = None
    fixed: Any = UNKNOWN
    kind: str = ""
    several: bool = False


def flags(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options in a command line (`--name value`, `--name=value`, `--name`), with underscores for dashes."""
    found: dict[str, Any] = {}
    for n, word in enumerate(argv):
        if word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            following = argv[n + 1] if n + 1 < len(argv) and not argv[n + 1].startswith("--") else None
            found[name.replace("-", "_")] = (
                literal(value) if given else True if following is None else literal(following)
            )
    return found


def literal(text: str) -> Any:
    """Convert a command-line argument to a boolean, a number or a string."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for cast in (int, float):
        try:
            return cast(text)
        except ValueError:
            continue
    return text


def added_option(node: ast.Call) -> tuple[str, Option]:
    """Return the name and the option that a call to `add_argument` declares."""
    words = tuple(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    given: Mapping[str | None, ast.expr] = {k.arg: k.value for k in node.keywords}
    action = _text(given.get("action")) or ast.unparse(given["action"]) if "action" in given else ""
    default = given.get("default")
    required = getattr(given.get("required"), "value", False) is True or bool(words and not words[0].startswith("-"))
    fixed = _FLAGS.get(action, UNKNOWN if required or action.startswith("append") else None)
    long = next((w for w in words if w.startswith("--")), words[0] if words else "")
    name = _text(given.get("dest")) or long.lstrip("-").replace("-", "_")
    kind = given.get("type")
    several = "nargs" in given or action.startswith("append")
    return name, Option(words, default, fixed, kind.id if isinstance(kind, ast.Name) else "", several)


def field_option(value: ast.expr | None) -> Option:
    """Return the option that a class field declares with its default value or with a call to `field`."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _FIELD):
        return Option(default=value)
    named = next((k.value for k in value.keywords if k.arg == "default"), None)
    return Option(default=named)


def given_value(option: Option, name: str, argv: Sequence[str], found: Mapping[str, Any]) -> Any:
    """Return an option's value on the command line, or None if it is not given.

    A short or abbreviated option counts as given, with an unknown value.
    """
    if name in found:
        return typed_value(option, name, argv, found[name])
    for word in argv:
        head = word.partition("=")[0]
        if head in option.words or (
            len(head) > 2 and head.startswith("--") and any(w.startswith(head) for w in option.words)
        ):
            return UNKNOWN
        if any(len(w) == 2 and word.startswith(w) and not word.startswith("--") for w in option.words):
            return UNKNOWN
    return None


def typed_value(option: Option, name: str, argv: Sequence[str], value: Any) -> Any:
    """Convert a given value to the option's type."""
    if option.several:
        return _values_after(name, argv)
    if option.kind == "str" and value is not True:
        return next(iter(_values_after(name, argv)), UNKNOWN)
    return value


def _values_after(name: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments after an option, up to the next option."""
    found: list[str] = []
    taking = False
    for word in argv:
        if word.startswith("--"):
            head, equals, value = word[2:].partition("=")
            taking = head.replace("-", "_") == name
            found += [value] if taking and equals else []
        elif taking:
            found.append(word)
    return found


def names_a_file(argv: Sequence[str]) -> bool:
    """Return true if a command line names a settings file, which may set any option."""
    return any(w.partition("=")[0] in {"--config", "--config_file", "--recipe"} for w in argv) or any(
        word.endswith((".yaml", ".yml", ".json", ".toml")) and not before.startswith("-")
        for before, word in zip(("", *argv), argv, strict=False)
    )


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
