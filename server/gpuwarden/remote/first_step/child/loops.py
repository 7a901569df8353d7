"""End training loops after their first optimizer step, so that the code after them runs too.

A loop is a training loop if its body calls `.backward(...)`, or a function in the script that calls it. A counter wraps
the loop's iterable or condition; line numbers do not change. A loop without an optimizer step ends after `MOST`
iterations.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterable, Iterator, Set

from gpuwarden.remote.first_step.child.record import Record

MOST = 64
FEW, MORE = "__rehearsal_few__", "__rehearsal_more__"


def shorten(tree: ast.Module) -> ast.Module:
    """Return the script with limits on the iterations of its training loops."""
    bounded: ast.Module = ast.fix_missing_locations(_Bounded(_training(tree)).visit(tree))
    return bounded


def counters(record: Record) -> Dict[str, Any]:
    """Return the two functions that the limited loops call."""
    rounds: Dict[int, int] = {}

    def few(items: Iterable[Any]) -> Iterator[Any]:
        before = record.steps
        for n, item in enumerate(items):
            if n and (record.steps > before or n >= MOST):
                return
            yield item

    def more(loop: int) -> bool:
        rounds[loop] = rounds.get(loop, 0) + 1
        return rounds[loop] == 1 or (record.steps == 0 and rounds[loop] <= MOST)

    return {FEW: few, MORE: more}


class _Bounded(ast.NodeTransformer):
    def __init__(self, training: Set[str]) -> None:
        self._training = training

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if _trains(node.body, self._training):
            node.iter = ast.copy_location(ast.Call(ast.Name(FEW, ast.Load()), [node.iter], []), node.iter)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        if _trains(node.body, self._training):
            asked = ast.Call(ast.Name(MORE, ast.Load()), [ast.Constant(node.lineno)], [])
            node.test = ast.copy_location(ast.BoolOp(ast.And(), [asked, node.test]), node.test)
        return node


def _training(tree: ast.Module) -> Set[str]:
    """Return the names of the script's functions that call `.backward(...)`, directly or indirectly."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found: Set[str] = set()
    while True:
        more = {f.name for f in functions if f.name not in found and _trains(f.body, found)}
        if not more:
            return found
        found |= more


def _trains(body: Iterable[ast.stmt], training: Set[str]) -> bool:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                if isinstance(node.func, ast.Attribute) and node.func.attr in {"backward", "manual_backward"}:
                    return True
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in training:
                    return True
    return False
