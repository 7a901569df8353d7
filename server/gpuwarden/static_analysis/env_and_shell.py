"""Find the environment variables that a program reads, and the programs that it starts."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from gpuwarden.static_analysis.static_eval import UNKNOWN, Program
from gpuwarden.static_analysis.survey import catches
from gpuwarden.static_analysis.three_valued import bounded


@dataclass(frozen=True)
class EnvRead:
    """An environment variable that a program reads. `required` is true if the program fails when it is not set.

    `checked` is true if the program has a default, tests the value, or catches the error.
    """

    name: str
    line: int
    required: bool
    checked: bool


@dataclass(frozen=True)
class Shell:
    """A program that a script starts: its arguments, whether its output is `hidden` and its failure is `checked`.

    `maybe` is true if the program may not be started on a new machine, or if the script continues without it.
    """

    words: tuple[str, ...]
    line: int
    hidden: bool
    checked: bool
    maybe: bool = False

    @property
    def program(self) -> str:
        """Return the program's name."""
        return self.words[0].rpartition("/")[2] if self.words else ""


# --------------------------------------------------------------------------------------------------- environment


def env_reads(program: Program) -> Iterator[EnvRead]:
    """Yield the environment variables that a program reads but does not set."""
    written = {key if isinstance(key, str) else UNKNOWN for key in _written(program)}
    tested: set[str] = set()
    bodies = [statement for node, _ in program.nodes if any(catches(node)) for statement in getattr(node, "body", ())]
    caught = {id(node) for statement in bodies for node in ast.walk(statement)}
    called = {program.dotted(n.func) for n, _ in program.nodes if isinstance(n, ast.Call) and id(n) in caught}
    looked_at = _tested(program)
    for node, scope in program.nodes:
        if isinstance(node, ast.Compare) and any(program.dotted(c) == "os.environ" for c in node.comparators):
            tested.add(str(program.value(node.left, scope)))
        elif id(node) in looked_at:
            tested.add(_env_read(program, node, scope)[0])
    for node, scope in program.nodes:
        name, required, default = _env_read(program, node, scope)
        if name and name not in written:
            called_there = getattr(scope, "name", None) in called  # the caller may catch the error
            guarded = name in tested or id(node) in caught or called_there or UNKNOWN in written
            line = getattr(node, "lineno", 0)
            yield EnvRead(name, line, required and not guarded, guarded or default or id(node) in looked_at)


def _written(program: Program) -> Iterator[Any]:
    """Yield the names of the environment variables that a program sets; UNKNOWN if a name is unknown."""
    for node, scope in program.nodes:
        match node:
            case ast.Subscript(value=value, slice=key, ctx=ast.Store()) if program.dotted(value) == "os.environ":
                yield program.value(key, scope)
            case ast.AugAssign(target=target, value=more) if program.dotted(target) == "os.environ":
                yield from _keys(program.value(more, scope))
    for call in program.calls:
        if call.name == "os.environ.setdefault":
            yield call.get("key", 0, UNKNOWN)
        elif call.name == "os.environ.update":
            yield from (*call.kwargs, *(key for given in call.args for key in _keys(given)))
            if call.open:
                yield UNKNOWN


def _keys(value: Any) -> Iterable[Any]:
    return value if isinstance(value, dict) else [UNKNOWN]


def _env_read(program: Program, node: ast.AST, scope: Any) -> tuple[str, bool, bool]:
    """Return the variable that a node reads, whether an unset variable is an error, and whether it has a default."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and program.dotted(node.value) == "os.environ"
    ):
        key = program.value(node.slice, scope)
        return (key, True, False) if isinstance(key, str) else ("", False, False)
    if isinstance(node, ast.Call) and program.dotted(node.func) in {"os.environ.get", "os.getenv"} and node.args:
        key = program.value(node.args[0], scope)
        return (key, False, len(node.args) > 1 or bool(node.keywords)) if isinstance(key, str) else ("", False, False)
    return "", False, False


def _tested(program: Program) -> set[int]:
    """Return the ids of expressions and assignments whose value is tested in a condition."""
    tests: list[ast.AST] = []
    for node, _ in program.nodes:
        if isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.While):
            tests.append(node.test)
        elif isinstance(node, ast.BoolOp):
            tests += node.values
    inside = {id(n): n for test in tests for n in ast.walk(test)}
    names = {n.id for n in inside.values() if isinstance(n, ast.Name)}
    assigned = {
        id(n.value)
        for n, _ in program.nodes
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id in names
    }
    return set(inside) | assigned


# ------------------------------------------------------------------------------------------------------ programs

_RUNS = frozenset({"run", "call", "check_call", "check_output", "Popen", "getoutput", "getstatusoutput"})
_SHELLS = frozenset({"os.system", "os.popen", "asyncio.create_subprocess_shell"})
_UNCHECKED = frozenset("run call system popen getoutput getstatusoutput".split())  # noqa: SIM905
_STARTS = re.compile(r"os\.(exec|spawn|posix_spawn)\w*|asyncio\.create_subprocess_exec")


def shells_of(program: Program) -> Iterator[Shell]:
    """Yield the programs that a script starts; shell lines are split into commands."""
    shown = any(isinstance(n, ast.Attribute) and n.attr in {"stdout", "stderr", "output"} for n, _ in program.nodes)
    for call in program.calls:
        run = call.name.startswith("subprocess.") and call.last in _RUNS
        named = _STARTS.fullmatch(call.name)  # the first argument is only the program
        if not run and not named and call.name not in _SHELLS:
            continue
        argv = UNKNOWN if named else call.get("args", 0)
        piped = call.kwargs.get("capture_output") is True or "stdout" in call.kwargs
        hidden = run and piped and not shown and call.last != "check_output"
        asked = call.last in {"getoutput", "getstatusoutput"}  # these raise no error
        checked = call.last not in _UNCHECKED or call.kwargs.get("check") is not None
        given = [(argv, call.line)]
        if argv is UNKNOWN and call.node is not None and call.node.args:
            passed = program.passed(call.node.args[0], call.scope)  # a function that runs the command passed to it
            given = passed or [(_worded(program, call.node.args[0], call.scope), call.line)]
        for value, line in given:
            for command in commands(value):
                yield Shell(command, line, hidden, checked, call.unusual or asked)


_DEEPEST = 50
"""Maximum nesting depth of an expression. Deeper parts are not read."""


def _worded(program: Program, node: ast.AST, scope: Any, depth: int = 0) -> str:
    """Return a shell line with `?` for its unknown and too deeply nested parts."""
    if depth > _DEEPEST:
        return "?"
    match node:
        case ast.JoinedStr(values=parts):
            words = [_worded(program, part, scope, depth + 1) for part in parts]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            words = [_worded(program, part, scope, depth + 1) for part in (left, right)]
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            words = [_worded(program, value, scope, depth + 1)]
        case _:
            value = program.value(node, scope)
            words = [str(value) if isinstance(value, str | int | float) else "?"]
    text = bounded("".join(words))
    return text if isinstance(text, str) else "?"


def commands(argv: Any) -> Iterator[tuple[str, ...]]:
    """Yield the simple commands in an argument list or a shell line; unknown arguments are `?`."""
    if isinstance(argv, str):
        for part in re.split(r"&&|\|\||[;|\n]", argv):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                words = part.split()
            yield from _unwrapped(words)
    elif isinstance(argv, list):
        yield from _unwrapped([w if isinstance(w, str) else "?" for w in argv])
    elif argv is UNKNOWN:
        yield ("?",)


_PREFIXES = frozenset({"sudo", "env", "time", "exec", "nohup"})


def _unwrapped(words: list[str]) -> Iterator[tuple[str, ...]]:
    words = [*dropwhile(lambda word: word in _PREFIXES or re.fullmatch(r"\w+=.*", word), words)]
    if (
        len(words) >= 3
        and words[0].rpartition("/")[2] in {"sh", "bash"}
        and words[1].startswith("-")
        and "c" in words[1]
    ):
        yield from commands(words[2])
    elif words:
        yield tuple(words)


def installed(shells: Iterable[Shell], tool: str) -> frozenset[str]:
    """Return the packages that a script itself installs with `tool` (`apt` or `pip`)."""
    found: set[str] = set()
    for shell in shells:
        words = [w.rpartition("/")[2] if n == 0 else w for n, w in enumerate(shell.words)]
        if "install" in words and (any(w.startswith(tool) for w in words[:4])):
            rest = words[words.index("install") + 1 :]
            found.update(w for w in rest if not w.startswith("-"))
    return frozenset(found)
