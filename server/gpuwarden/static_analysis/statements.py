"""Read single statements: the parts that always run, and the variables that they set and read."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gpuwarden.static_analysis.survey import Scope

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NONE = "None "
"""The mark of a variable that is None."""
_INNER = (ast.stmt, ast.ExceptHandler, ast.match_case)


def flattened(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the `with` blocks in it."""
    stack = [*reversed(block)]
    while stack:
        yield (statement := stack.pop())
        if isinstance(statement, ast.With | ast.AsyncWith):
            stack += reversed(statement.body)


def parts_of(node: ast.stmt, *, header: bool = False) -> Iterator[ast.AST]:
    """Yield the parts of a statement, but not its blocks if it is a `with`, or if only the `header` is asked for."""
    yield node
    header = header or isinstance(node, ast.With | ast.AsyncWith)
    for child in ast.iter_child_nodes(node):
        if not (header and isinstance(child, _INNER)):
            yield from ast.walk(child)


def certain_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of the first line of a statement that always run."""
    children = () if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else ast.iter_child_nodes(node)
    stack: list[ast.AST] = [child for child in children if not isinstance(child, _INNER)]
    while stack:
        yield (part := stack.pop())
        match part:
            case ast.Lambda():
                pass
            case ast.IfExp(test=first) | ast.BoolOp(values=[first, *_]) | ast.Assert(test=first):
                stack.append(first)
            case ast.Compare(left=left, comparators=[right, *_]):
                stack += [left, right]
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                stack.append(part.generators[0].iter)
            case _:
                stack += ast.iter_child_nodes(part)


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the variables that a node sets."""
    match node:
        case ast.Name(ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            yield variable(node)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield other or name.partition(".")[0]


def parameters(scope: Scope) -> list[str]:
    """Return the names of a function's parameters, without `*` and `**`."""
    given = scope.args if isinstance(scope, FUNCTIONS) else None
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)] if given else []


def is_field(name: str) -> bool:
    """Return true for an attribute of `self`."""
    return name.startswith("self.")


def variable(node: ast.AST | None) -> str:
    """Return the name of a variable or of an attribute of `self`; empty for another expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
    return ""


def none_mark(node: ast.AST | None) -> str:
    """Return the mark of a variable or of a call's result that is None; empty for another expression."""
    node = node.value if isinstance(node, ast.Await) else node
    name = str(id(node)) if isinstance(node, ast.Call) else variable(node)
    return NONE + name if name else ""


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def is_none(node: ast.expr | None) -> bool:
    """Return true for a missing value, None or a tuple of None."""
    match node:
        case None | ast.Constant(value=None):
            return True
        case ast.Tuple(elts=[_, *_] as parts):
            return all(map(is_none, parts))
    return False
