"""Read the settings that a bundled trainer declares, and the values that a job sets for them.

A trainer declares its settings as dataclass fields, `name: type = option(default, help, choices=..., least=...,
most=...)`. Their values come from the variables TRAIN_NAME and from flags, which take precedence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.static_analysis.hub_references import RepoUse
from gpuwarden.static_analysis.static_eval import UNKNOWN, Program

_DECLARES = "option"
DECLARING = frozenset({_DECLARES, "read_settings"})
"""Functions that every bundled trainer defines for its settings."""
_ENVIRONMENT = "TRAIN_"
_LARGEST = 1e300
# Command-line flags that are not settings.
_OTHER_FLAGS = frozenset({"config", "help"})
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
_WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


@dataclass(frozen=True)
class Declared:
    """One setting that a script declares."""

    name: str
    kind: str
    default: Any = None
    about: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    several: bool = False

    @property
    def flag(self) -> str:
        """Return the command-line flag."""
        return f"--{self.name.replace('_', '-')}"

    def correction(self, value: object) -> str:
        """Return advice for correcting a value, or an empty string if the value is valid."""
        words = [word.strip() for word in str(value).split(",")] if self.several else [str(value)]
        if self.choices and not set(words) <= set(self.choices):
            return f"Choose one of {', '.join(self.choices)}."
        if self.kind in _KINDS and (
            not isinstance(value, _KINDS[self.kind]) or (isinstance(value, bool) and self.kind != "bool")
        ):
            return f"Pass a value of type {self.kind}."
        low, high = self.least, self.most
        # NaN is also outside the range.
        outside = isinstance(value, int | float) and not (
            (low is None or value >= low) and (high is None or value <= high)
        )
        limits = f"from {low if low is not None else '-infinity'} to {high if high is not None else 'infinity'}"
        return f"Choose a value {limits}." * outside


@dataclass(frozen=True)
class TypedSettings:
    """The settings that a script declares, those that a job sets, and those that are required."""

    declared: Mapping[str, Declared] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    # The data must have all columns from one of these sets. Empty if the script does not list any sets.
    columns: tuple[frozenset[str], ...] = ()
    file: str = ""

    @property
    def unknown(self) -> list[str]:
        """Return the names of given settings that are not declared."""
        return sorted(name for name in self.given if name not in self.declared)

    @property
    def missing(self) -> list[str]:
        """Return the required settings that are not given; empty if a file or a smoke run may supply them."""
        elsewhere = self.file or self.given.get("smoke")
        return [] if elsewhere else sorted(name for name in self.required if not self.given.get(name))

    def text(self, name: str) -> str:
        """Return a given setting as text, or an empty string if it is not given."""
        value = self.given.get(name, "")
        return "" if value is UNKNOWN or value is True else str(value)

    @property
    def renames(self) -> dict[str, str]:
        """Return the columns that `--columns old=new,old=new` renames."""
        return pairs(self.text("columns"))


def pairs(text: str) -> dict[str, str]:
    """Parse `name=value,name=value`, the form of `--columns` and `--extra`. Parts without `=` are skipped."""
    parts = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): value.strip() for name, _, value in parts}


def typed_settings(program: Program) -> TypedSettings | None:
    """Return a program's settings; None if it does not declare all of them in the expected form."""
    defined = {node.name for node, scope in program.nodes if isinstance(node, ast.FunctionDef) and scope is None}
    if not defined >= DECLARING:
        return None
    classes = _classes(program)
    declared = {found.name: found for found in _declared(program, classes)}
    if not declared or classes[0].bases or not all(map(_understood, classes)):
        return None
    given: dict[str, Any] = {
        name: _from_variable(setting, program.env[variable])
        for name, setting in declared.items()
        if (variable := _ENVIRONMENT + name.upper()) in program.env
    }
    for name, value in program.flags.items():
        plain = name.removeprefix("no_")
        if plain != name and value is True and plain in declared and declared[plain].kind == "bool":
            given[plain] = False
        elif name not in _OTHER_FLAGS:
            given[name] = value
    return TypedSettings(
        declared=declared,
        given=given,
        required=frozenset(_required(classes)),
        columns=_columns(program),
        file=str(program.flags.get("config", "")),
    )


def _from_variable(setting: Declared, value: Any) -> Any:
    """Convert a variable's string as the script does; return the string itself if that fails."""
    try:
        if setting.kind == "bool":
            return _WORDS[str(value).lower()]
        return {"int": int, "float": float}.get(setting.kind, str)(value)
    except (KeyError, ValueError, TypeError):
        return value


def settings_repos(settings: TypedSettings) -> Iterator[RepoUse]:
    """Yield the repos that the settings name."""
    text = settings.text
    for name in ("model", "teacher", "chat_template_from"):
        revision = text("revision") or None if name == "model" else None
        role = "tokenizer" if name == "chat_template_from" else "model"
        yield RepoUse(text(name), "model", 0, role, revision=revision, trains=name == "model")
    config = text("dataset_config") or None
    splits = [(text("dataset"), text("split") or "train")]
    if text("eval_dataset") or text("eval_split"):
        splits.append((text("eval_dataset") or text("dataset"), text("eval_split") or text("split") or "train"))
    yield from (RepoUse(name, "dataset", 0, "data", config=config, split=split) for name, split in splits)


def _classes(program: Program) -> list[ast.ClassDef]:
    """Return the settings class, the last class in the script that declares settings, preceded by its bases."""
    classes = {node.name: node for node, scope in program.nodes if isinstance(node, ast.ClassDef) and scope is None}
    line = [node for node in classes.values() if any(_declaration(part) for part in node.body)][-1:]
    while line:
        match line[0].bases:
            case [ast.Name(id=name)] if name in classes and classes[name] is not line[-1]:
                line.insert(0, classes.pop(name))
            case _:
                break
    return line


def _understood(node: ast.ClassDef) -> bool:
    """Return true if a settings class declares all its settings itself, in the expected form."""
    options = [
        part
        for part in node.body
        if isinstance(part, ast.AnnAssign | ast.Assign)
        and isinstance(part.value, ast.Call)
        and isinstance(part.value.func, ast.Name)
        and part.value.func.id == _DECLARES
    ]
    return len(node.bases) <= 1 and not node.keywords and all(_declaration(part) for part in options)


def _declaration(node: ast.stmt) -> tuple[str, str, ast.Call] | None:
    """Return the name, the type and the call of a field that is declared with `option`."""
    match node:
        case ast.AnnAssign(
            target=ast.Name(id=name),
            annotation=ast.Name(id=kind),
            value=ast.Call(func=ast.Name(id=called)) as call,
        ) if called == _DECLARES:
            return name, kind, call
    return None


def _declared(program: Program, classes: list[ast.ClassDef]) -> Iterator[Declared]:
    """Yield the settings that the classes declare, in the order of the classes."""
    for name, kind, call in filter(None, (_declaration(node) for one in classes for node in one.body)):
        limits = {k.arg: program.value(k.value) for k in call.keywords if k.arg}
        choices = limits.get("choices")
        yield Declared(
            name,
            kind,
            default=program.value(call.args[0]) if call.args else None,
            about=str(program.value(call.args[1])) if len(call.args) > 1 else "",
            choices=tuple(choices) if isinstance(choices, list) and all(isinstance(c, str) for c in choices) else (),
            least=_number(limits.get("least")),
            most=_number(limits.get("most")),
            several=limits.get("several") is True,
        )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def _required(classes: list[ast.ClassDef]) -> Iterator[str]:
    """Yield the settings that a `check` method requires: those in statements such as `if not self.NAME: raise ...`."""
    checks = [f for one in classes for f in one.body if isinstance(f, ast.FunctionDef) and f.name == "check"]
    for node in (inner for check in checks for inner in ast.walk(check)):
        match node:
            case ast.If(
                test=ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(value=ast.Name(id="self"), attr=name)),
                body=[ast.Raise(), *_],
            ):
                yield name


def _columns(program: Program) -> tuple[frozenset[str], ...]:
    """Return the column sets in WANTED."""
    wanted: Any = UNKNOWN
    for node, scope in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id="WANTED")], value=value) if scope is None:
                wanted = program.value(value)
    if not isinstance(wanted, list) or not all(isinstance(group, list) for group in wanted):
        return ()
    return tuple(frozenset(map(str, group)) for group in wanted)
