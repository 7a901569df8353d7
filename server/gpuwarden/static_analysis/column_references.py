"""Find the columns that a training program reads, renames and creates."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from gpuwarden.static_analysis.static_eval import Call, Program

_RESHAPES = frozenset(
    """map with_transform set_transform from_list from_dict from_generator from_pandas add_column extract_prompt
    to_pandas to_list unpair_preference_dataset concatenate_datasets interleave_datasets""".split()  # noqa: SIM905
)


def columns_of(program: Program) -> tuple[dict[str, str], set[str], bool]:
    """Return the renamed columns, the new columns, and whether rows are changed in ways that can't be analyzed."""
    renames: dict[str, str] = {}
    reshaped = False
    makes: set[str] = set()
    for call in program.calls:
        if call.last in {"rename_column", "rename_columns"}:
            found = renamed_by(call) if call.certain else None
            reshaped = reshaped or found is None
            renames |= found or {}
        elif call.last == "add_column" and call.args and isinstance(call.args[0], str):
            makes.add(call.args[0])
        elif call.last in _RESHAPES and call.name.startswith((".", "datasets.", "trl.")):
            reshaped = True
    for node, scope in program.nodes:
        if isinstance(node, ast.Dict):
            makes.update(k for key in node.keys if isinstance(k := program.value(key, scope), str))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if isinstance(key := program.value(node.slice, scope), str):
                makes.add(key)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            makes.update(k.arg for k in node.keywords if k.arg)
    return renames, makes, reshaped


def renamed_by(call: Call) -> dict[str, str] | None:
    """Return the columns that a call renames; None if they are unknown."""
    if len(call.args) >= 2 and all(isinstance(a, str) for a in call.args[:2]):
        return {call.args[0]: call.args[1]}
    mapping = call.get("column_mapping", 0)
    return {k: v for k, v in mapping.items() if isinstance(v, str)} if isinstance(mapping, dict) else None


ROW_FUNCTIONS = frozenset({"map", "filter", "with_transform", "set_transform"})


def row_functions(program: Program) -> Iterator[tuple[Call, ast.expr | None]]:
    """Yield the calls that change or filter rows, each with the function that it applies."""
    for call in program.calls:
        if call.last in ROW_FUNCTIONS and call.name.startswith(".") and call.node is not None:
            given = call.node.args[:1] or [k.value for k in call.node.keywords if k.arg in {"function", "transform"}]
            yield call, given[0] if given else None


def column_reads(program: Program) -> Iterator[tuple[str, int]]:
    """Yield the columns that row functions and reward functions read from every row, each with its line."""
    certain = {id(node) for node, _ in program.nodes} - program.maybe - program.tried - program.optional
    functions = {n.name: n for n, _ in program.nodes if isinstance(n, ast.FunctionDef)}
    for call in program.calls:
        if call.last.endswith("Trainer") and call.node is not None:
            yield from reward_reads(_named(call.node, "reward_funcs"), functions)
    for function, maybe in _row_readers(program, functions):
        for node in () if maybe else ast.walk(function):
            if id(node) in certain and (key := _read(node, function)):
                yield key, getattr(node, "lineno", 0)


def reads_of_some_rows(program: Program) -> Iterator[tuple[str, int, frozenset[str]]]:
    """Yield each column that row functions read only if other columns have certain values.

    If a function is applied only under an unknown condition, every column that it reads is included.

    Each item is the column, the line, and the other columns.

    Only conditions that read the other columns with `get` are used, because a dataset that has these columns probably
    has rows with such values. Conditions that test whether a row has a column, or that do not depend on the row, are
    ignored.
    """
    runs = {id(node) for node, _ in program.nodes} - program.optional - program.tried
    functions = {n.name: n for n, _ in program.nodes if isinstance(n, ast.FunctionDef)}
    for function, maybe in _row_readers(program, functions):
        pending: list[tuple[ast.AST, frozenset[str] | None]] = [(function, frozenset() if maybe else None)]
        while pending:
            node, tested = pending.pop()
            if tested is not None and id(node) in runs and (key := _read(node, function)):
                yield key, getattr(node, "lineno", 0), tested
            below = tested
            if isinstance(node, ast.If | ast.IfExp):
                asked = _tested_columns(node.test, function.args.args[0].arg)
                if asked is None:
                    continue
                below = asked | (tested or frozenset())
            pending += [(child, below) for child in ast.iter_child_nodes(node)]


def _tested_columns(test: ast.expr, row: str) -> frozenset[str] | None:
    """Return the columns that a condition on a row reads with `get`; None for any other condition."""
    found: set[str] = set()
    for node in ast.walk(test):
        match node:
            case ast.Compare(ops=ops) if any(isinstance(op, ast.In | ast.NotIn) for op in ops):
                return None
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[ast.Constant(value=str(key))]):
                if name == row:
                    found.add(key)
            case ast.Call() if any(isinstance(n, ast.Name) and n.id == row for n in ast.walk(node)):
                return None
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    return frozenset(found) if row in names else None


def _row_readers(
    program: Program, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[tuple[ast.FunctionDef | ast.Lambda, bool]]:
    """Yield the functions that receive rows as their first parameter, and whether they are applied conditionally."""
    given = [(node, not call.certain) for call, node in row_functions(program)]
    given += [
        (_named(c.node, "formatting_func"), False) for c in program.calls if c.last.endswith("Trainer") and c.node
    ]
    seen: dict[int, tuple[ast.FunctionDef | ast.Lambda, bool]] = {}
    for node, maybe in sorted(given, key=lambda one: one[1]):
        inner: Any = functions.get(node.id) if isinstance(node, ast.Name) else node
        if isinstance(inner, ast.FunctionDef | ast.Lambda) and inner.args.args:
            seen.setdefault(id(inner), (inner, maybe))
    yield from seen.values()


def _named(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _read(node: ast.AST, function: ast.FunctionDef | ast.Lambda) -> str:
    """Return the column that a node reads from the row passed to a function, or an empty string."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            return key if name == function.args.args[0].arg else ""
    return ""


# Reward function parameters that trl itself passes; all other parameters are columns.
_REWARD_GIVEN = frozenset(
    {"self", "prompts", "completions", "completion_ids", "trainer_state", "environments", "log_extra", "log_metric"}
)


def reward_reads(node: ast.expr | None, functions: Mapping[str, ast.FunctionDef]) -> Iterator[tuple[str, int]]:
    """Yield the columns that reward functions require as parameters."""
    for item in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        function = functions.get(item.id) if isinstance(item, ast.Name) else None
        if function is not None:
            needed = function.args.args[: len(function.args.args) - len(function.args.defaults)]
            yield from ((a.arg, function.lineno) for a in needed if a.arg not in _REWARD_GIVEN)
