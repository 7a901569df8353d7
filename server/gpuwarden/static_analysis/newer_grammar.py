"""Parse Python with the grammar of releases newer than the running interpreter.

Each newer construct is rewritten into older grammar with the same line numbers, and the standard library parses the
result. The alternatives don't work: a newer interpreter is rarely installed, parso 0.8 can't parse these f-strings and
`type` statements, and libcst uses a different kind of syntax tree. Values that a rule could misread become unknown: a
t-string and an unpacking comprehension become calls to an undefined name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Final

from gpuwarden.static_analysis.grammar_rewriting import Construct, Rewriting

NEWEST: Final = (3, 15)
"""The newest supported grammar."""


def parse_newer(source: str) -> tuple[ast.Module, tuple[Construct, ...]]:
    """Return a program's tree and its newer constructs. Raises SyntaxError if no known release can parse it."""
    rewriting = Rewriting(source)
    tree = ast.parse(rewriting.text(0, len(source), rewriting.tokens) + "\n")
    return (_Restorer(rewriting).visit(tree) if rewriting.found else tree), tuple(rewriting.found)


def newer_constructs(source: str) -> tuple[Construct, ...]:
    """Return the newer constructs in a program that the running Python can parse itself."""
    try:
        rewriting = Rewriting(source)
        rewriting.text(0, len(source), rewriting.tokens)
    except (SyntaxError, RecursionError):
        return ()
    return tuple(rewriting.found)


def newest(constructs: Sequence[Construct]) -> Construct | None:
    """Return the construct that needs the latest Python release; the first one if several need it."""
    last = max((c.version for c in constructs), default=None)
    return next((c for c in constructs if c.version == last), None)


def described(construct: Construct) -> str:
    """Describe a construct: its line, its name and the Python version that it requires."""
    major, minor = construct.version
    return f"line {construct.line} has {construct.what}, which needs Python {major}.{minor}"


class _Restorer(ast.NodeTransformer):
    """Restore the expressions that placeholders replaced, and convert each t-string and each unpacking comprehension
    into a call.
    """

    def __init__(self, rewriting: Rewriting) -> None:
        self.rewriting = rewriting
        self.stem = rewriting.stem
        self._shown = re.compile(f"{self.stem}[0-9]+=")

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression that a placeholder replaced."""
        found = self.rewriting.hoisted.get(node.id)
        return node if found is None else self.visit(found)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Restore the code that `{code=}` prints in a string."""
        if isinstance(node.value, str) and self.stem in node.value:
            node.value = self._shown.sub(lambda match: self.rewriting.shown[match[0]], node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Return an f-string, or a call in place of a t-string."""
        mark = f"{self.stem}template"
        values = [v for v in node.values if not (isinstance(v, ast.FormattedValue) and _named(v.value, mark))]
        template, node.values = len(values) < len(node.values), values
        self.generic_visit(node)
        return _call(mark, node) if template else node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        """Return a list comprehension, or a call if the comprehension unpacks."""
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        """Return a set comprehension, or a call if the set or dictionary comprehension unpacks."""
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        """Return a generator expression, or a call if the expression unpacks."""
        return self._comprehension(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.expr:
        self.generic_visit(node)
        mark = f"{self.stem}unpacked"
        return _call(mark, node) if isinstance(node.elt, ast.Call) and _named(node.elt.func, mark) else node


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _call(name: str, argument: ast.expr) -> ast.expr:
    called = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=[argument], keywords=[])
    return ast.fix_missing_locations(ast.copy_location(called, argument))
