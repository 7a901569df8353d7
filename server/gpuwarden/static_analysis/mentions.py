"""Find functions and classes that a program passes on, stores or renames.

They may be called anywhere, with any arguments: `pool.submit(torch.save, ...)`, `T = SFTTrainer`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.static_analysis.static_eval import SETTINGS, Program


@dataclass(frozen=True)
class Mention:
    """A callable that is mentioned but not called. `imported` is false for an attribute of a variable."""

    name: str
    line: int
    imported: bool

    @property
    def last(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition(".")[2]


def mentions(program: Program) -> Iterator[Mention]:
    """Yield the functions, methods and classes that a program mentions without calling them, except its settings."""
    own = {n.name for n, _ in program.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    hints = (getattr(node, name, None) for node, _ in program.nodes for name in ("annotation", "returns"))
    types = {id(n) for hint in hints if hint is not None for n in ast.walk(hint)}
    for node in (part for n, _ in program.nodes for part in _handed_on(program, n) if id(part) not in types):
        match node:
            case ast.Name(id=name) if name in program.aliases or name in program.classes:
                yield Mention(program.dotted(node), node.lineno, imported=True)
            case (
                ast.Attribute(value=owner, attr=attr)
                | ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(attr)), *_])
            ):
                base = program.dotted(owner)
                if not (base.endswith(SETTINGS) or attr in own or program.option(attr) is not None):
                    yield Mention(f"{base}.{attr}", node.lineno, _root(owner) in program.aliases)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _handed_on(program: Program, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node whose value is passed on or stored, and calls of `getattr` with a constant name."""
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str()), *_]):
            yield node
        case ast.Call(func=func, args=args, keywords=keywords):
            if program.dotted(func) not in {"isinstance", "issubclass", "super"}:
                yield from args
                yield from (k.value for k in keywords)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            yield value
        case ast.Return(value=ast.expr() as value):
            yield value
        case ast.Dict(values=values) | ast.List(elts=values) | ast.Tuple(elts=values) | ast.BoolOp(values=values):
            yield from values
        case ast.IfExp(body=one, orelse=other):
            yield from (one, other)
        case ast.FunctionDef(args=given) | ast.AsyncFunctionDef(args=given) | ast.Lambda(args=given):
            yield from (n for n in (*given.defaults, *given.kw_defaults) if n is not None)
