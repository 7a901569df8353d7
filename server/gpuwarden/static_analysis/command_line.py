"""Find the flags that a script's command line accepts, declared with argparse or as dataclass fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuwarden.static_analysis.package_usage import OWN
from gpuwarden.static_analysis.static_eval import UNKNOWN, Call, Program

_DATACLASS_PARSERS = {"HfArgumentParser": False, "TrlParser": True, "H4ArgumentParser": True}
"""Parsers that create flags from dataclasses. The value is true if the parser handles `--config FILE` itself."""
_EXACT = frozenset({"parse_args", "parse_args_into_dataclasses", "parse_args_and_config"})
_TOLERANT = frozenset({"parse_known_args", "parse_known_intermixed_args"})


@dataclass(frozen=True)
class CommandLine:
    """The flags that a script declares.

    `flags` maps each flag, with dashes replaced by underscores, to the strings that it accepts (empty: any). `classes`
    lists the dataclasses whose fields are also flags. `abbreviates` is true if flags may be abbreviated, `ignores` if
    unknown flags have no effect, and `partial` if other code may add flags or read unknown flags.
    """

    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    abbreviates: bool = True
    ignores: bool = False
    partial: bool = False


def command_line(program: Program) -> CommandLine | None:
    """Return the flags that a program accepts; None if it parses no flags, or if some flags can't be determined."""
    parsers = [c for c in program.calls if c.last in {"ArgumentParser", *_DATACLASS_PARSERS}]
    last = {c.last for c in program.calls}
    if len(parsers) != 1 or "add_subparsers" in last or not last & (_EXACT | _TOLERANT):
        return None
    parser, node_of = parsers[0], parsers[0].node
    holders = {
        t.id
        for node, _ in program.nodes
        if isinstance(node, ast.Assign) and node.value is parser.node
        for t in node.targets
        if isinstance(t, ast.Name)
    }
    parses = [call for call in program.calls if call.last in _EXACT | _TOLERANT]
    chained = any(c.node and isinstance(c.node.func, ast.Attribute) and c.node.func.value is node_of for c in parses)
    if not (holders or chained) or parser.open or parser.kwargs.keys() & {"parents", "argument_default"}:
        return None
    if any(call.open or _elsewhere(call) for call in parses):
        return None
    # TrlParser's `fail_with_unknown_args` applies only to its settings file.
    tolerant = [
        call.node
        for call in parses
        if call.last in _TOLERANT or call.get("return_remaining_strings", default=False) is not False
    ]
    hands_on = any(node is None or not _drops_rest(program, node) for node in tolerant)
    partial = hands_on or _escapes(program, holders)
    flags = _declared(program)
    if flags is None or any(c in "".join(str(parser.kwargs.get("prefix_chars", "-"))) for c in "+/"):
        return None
    classes: tuple[str, ...] = ()
    if parser.last in _DATACLASS_PARSERS and node_of is not None:
        found = list(_classes(program, node_of))
        if not found or "" in found:
            return None
        classes = tuple(found)
        flags |= {"config": ()} if _DATACLASS_PARSERS[parser.last] else {}
    abbreviates = parser.kwargs.get("allow_abbrev", True) is True
    return CommandLine(flags | {"help": ()}, classes, abbreviates, bool(tolerant), partial)


def _elsewhere(call: Call) -> bool:
    """Return true if a call parses a list or a file of arguments instead of the command line."""
    given = (call.get(name) for name in ("args", "args_filename"))
    return any(a is not None for a in (*call.args, *given))


def _drops_rest(program: Program, parse: ast.Call) -> bool:
    """Return true if the program never reads the unknown flags that `parse_known_args` or a similar call returns."""
    read = {node.id for node, _ in program.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node, _ in program.nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=[*_, ast.Name(id=rest)])], value=value) if value is parse:
                return rest not in read
            case ast.Subscript(value=value, slice=ast.Constant(value=0)) if value is parse:
                return True
    return False


def _escapes(program: Program, holders: set[str]) -> bool:
    """Return true if the parser is passed to code that may add flags."""
    # A function that returns the parser does not add flags.
    returned = {id(node.value) for node, _ in program.nodes if isinstance(node, ast.Return)}
    methods: set[int] = set()
    for node, _ in program.nodes:
        if isinstance(node, ast.Attribute):
            methods.add(id(node.value))
    return any(
        isinstance(node, ast.Name)
        and node.id in holders
        and isinstance(node.ctx, ast.Load)
        and id(node) not in methods
        and id(node) not in returned
        for node, _ in program.nodes
    )


def _declared(program: Program) -> dict[str, tuple[str, ...]] | None:
    """Return the flags that `add_argument` declares; None if one of them is unknown."""
    flags: dict[str, tuple[str, ...]] = {}
    for call in program.calls:
        if call.last in {"set_defaults", "register"}:
            return None
        if call.last != "add_argument":
            continue
        names = [a for a in call.args if isinstance(a, str)]
        if call.open or len(names) != len(call.args) or not names:
            return None
        choices = call.kwargs.get("choices", [])
        known = isinstance(choices, list) and all(isinstance(c, str) for c in choices)
        accepted = tuple(choices) if known and call.kwargs.get("type") in (None, UNKNOWN) else ()
        long = [n.lstrip("-").replace("-", "_") for n in names if n.startswith("--")]
        flags |= dict.fromkeys(long, accepted)
        action = call.node and next((ast.unparse(k.value) for k in call.node.keywords if k.arg == "action"), "")
        if action and "BooleanOptionalAction" in action:
            flags |= {f"no_{name}": () for name in long}
    return flags


def _classes(program: Program, parser: ast.Call) -> Iterator[str]:
    """Yield the names of a parser's dataclasses, and an empty string for each one whose name is unknown."""
    given = next(
        (k.value for k in parser.keywords if k.arg == "dataclass_types"), parser.args[0] if parser.args else None
    )
    if isinstance(given, ast.Name):
        stored = ((n.value, t) for n, _ in program.nodes if isinstance(n, ast.Assign) for t in n.targets)
        found = [value for value, t in stored if isinstance(t, ast.Name) and t.id == given.id]
        given = found[0] if len(found) == 1 else given
    local = {node.name for node, scope in program.nodes if isinstance(node, ast.ClassDef) and scope is None}
    for part in given.elts if isinstance(given, ast.Tuple | ast.List) else [given]:
        name = program.dotted(part) if isinstance(part, ast.Name | ast.Attribute) else ""
        yield OWN + name if name in local else name if "." in name.lstrip(".") and not name.startswith(".") else ""
