"""The columns that a training program reads, renames and makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from gpuwarden.scripts.static_eval import Program

_RESHAPES = frozenset(
    """map with_transform set_transform from_list from_dict from_generator from_pandas add_column extract_prompt
    to_pandas to_list unpair_preference_dataset concatenate_datasets interleave_datasets""".split()  # noqa: SIM905
)


def columns_of(program: Program) -> tuple[dict[str, str], set[str], bool]:
    """Return renamed columns, names of columns that are made, and whether rows are changed in ways that are not
    followed.
    """
    renames: dict[str, str] = {}
    reshaped = False
    makes: set[str] = set()
    for call in program.calls:
        if call.last == "rename_column" and len(call.args) >= 2 and all(isinstance(a, str) for a in call.args[:2]):
            renames[call.args[0]] = call.args[1]
        elif call.last in {"rename_columns", "rename_column"}:
            mapping = call.get("column_mapping", 0)
            if isinstance(mapping, dict):
                renames |= {k: v for k, v in mapping.items() if isinstance(v, str)}
            else:
                reshaped = True
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


ROW_FUNCTIONS = frozenset({"map", "filter", "with_transform", "set_transform"})


def column_reads(program: Program) -> Iterator[tuple[str, int]]:
    """Yield columns that the functions given to `map` and `filter` read from their rows."""
    functions = {n.name: n for n, _ in program.nodes if isinstance(n, ast.FunctionDef)}
    seen: dict[int, ast.FunctionDef | ast.Lambda] = {}
    for call in program.calls:
        if call.last in ROW_FUNCTIONS and call.name.startswith(".") and call.node is not None:
            given = call.node.args[:1] or [k.value for k in call.node.keywords if k.arg in {"function", "transform"}]
            inner: Any = given[0] if given else None
            if isinstance(inner, ast.Name):
                inner = functions.get(inner.id)
            if isinstance(inner, ast.FunctionDef | ast.Lambda) and inner.args.args:
                seen[id(inner)] = inner
    for call in program.calls:
        if call.last.endswith("Trainer") and call.node is not None:
            named = {k.arg: k.value for k in call.node.keywords if k.arg in {"formatting_func", "reward_funcs"}}
            formatter = named.get("formatting_func")
            if isinstance(formatter, ast.Name) and (inner := functions.get(formatter.id)) and inner.args.args:
                seen[id(inner)] = inner
            yield from _reward_reads(named.get("reward_funcs"), functions)
    for function in seen.values():
        row = function.args.args[0].arg
        for node in ast.walk(function):
            match node:
                case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)), ctx=ast.Load()) if (
                    name == row
                ):
                    yield key, node.lineno


# What trl itself passes to a reward function; its other parameters are columns.
_REWARD_GIVEN = frozenset(
    {"self", "prompts", "completions", "completion_ids", "trainer_state", "environments", "log_extra", "log_metric"}
)


def _reward_reads(node: ast.expr | None, functions: Mapping[str, ast.FunctionDef]) -> Iterator[tuple[str, int]]:
    """Yield the columns that reward functions require as parameters."""
    for item in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
        function = functions.get(item.id) if isinstance(item, ast.Name) else None
        if function is not None:
            needed = function.args.args[: len(function.args.args) - len(function.args.defaults)]
            yield from ((a.arg, function.lineno) for a in needed if a.arg not in _REWARD_GIVEN)
