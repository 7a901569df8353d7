"""Decide whether a program trains on a streamed dataset by tracing the training set to the calls that load it."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final, TypeAlias

from gpuwarden.static_analysis.static_eval import UNKNOWN, Call, Program
from gpuwarden.static_analysis.survey import Scope

Sources: TypeAlias = "set[bool | None]"
"""Whether a dataset's sources are streamed; None if a source is unknown."""
_DEPTH: Final = 25
_NEEDS_STEPS: Final = ("transformers.", "trl.", "sentence_transformers.", "unsloth.")
# Functions and methods whose result is a stream if their first argument or their object is a stream.
_KEEP: Final = frozenset(
    """map filter shuffle skip take select_columns remove_columns rename_column rename_columns cast cast_column
    with_format batch shard repeat add_column concatenate_datasets interleave_datasets""".split()  # noqa: SIM905
)


def trains_on_stream(program: Program, trainers: Iterable[Call]) -> bool | None:
    """Return whether one of the trainers is given a streamed dataset to train on; None if unknown."""
    streams = _Streams(program)
    if not any(True in streams.loaded(call) for call in program.calls):
        return False
    found = []
    for trainer in trainers:
        named = [k.value for k in (trainer.node.keywords if trainer.node else ()) if k.arg == "train_dataset"]
        own = program.classes.get(trainer.name)
        name = program.dotted(own.bases[0]) if own and own.bases else trainer.name
        if named or trainer.open or len(trainer.args) > 2:
            # None if the training set is unknown, or if the trainer may not need `max_steps`.
            data = named[0] if named and name.startswith(_NEEDS_STEPS) and not trainer.maybe else None
            found.append(streams.of(data, trainer.scope))
    return True if {True} in found else None if any(sources - {False} for sources in found) else False


class _Streams:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.calls = {id(call.node): call for call in program.calls}
        self.names: dict[tuple[str, int], Sources] = {}
        self.results: dict[str, Sources] = {}
        self.returned: dict[Scope, list[ast.expr]] = {}
        for node, scope in program.nodes:
            if isinstance(node, ast.Return) and node.value is not None:
                self.returned.setdefault(scope, []).append(node.value)

    def loaded(self, call: Call) -> Sources:
        """Return whether a call to `load_dataset` streams; empty for any other call."""
        streaming = call.get("streaming", default=False)
        return {None if streaming is UNKNOWN else streaming is True} if call.last == "load_dataset" else set()

    def of(self, node: ast.AST | None, scope: Scope, depth: int = 0) -> Sources:
        """Return the sources of an expression."""
        match node if depth < _DEPTH else None:
            case ast.Constant(value=value):
                return {False} if value is not None else set()
            case ast.Name(id=name):
                return self.variable(name, scope, depth)
            case ast.Call() as call if id(call) in self.calls:
                return self.called(call, self.calls[id(call)], depth)
            case ast.Dict(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.BoolOp(values=parts):
                return self.all_of(parts, scope, depth)
            case ast.IfExp(body=one, orelse=other):
                return self.all_of([one, other], scope, depth)
            case ast.Subscript(value=part) | ast.NamedExpr(value=part):
                return self.of(part, scope, depth + 1)
        return {None}

    def all_of(self, parts: Iterable[ast.AST | None], scope: Scope, depth: int) -> Sources:
        """Return the sources of several expressions."""
        return {source for part in parts for source in self.of(part, scope, depth + 1)}

    def variable(self, name: str, scope: Scope, depth: int) -> Sources:
        """Return the sources of all values that are assigned to a variable or passed as a parameter."""
        key = (name, id(self.program.home(name, scope)))
        if key not in self.names:
            self.names[key] = set()  # a variable that is its own source adds nothing
            found = [*self.program.bound(name, scope)]
            self.names[key] = {s for node, at in found for s in self.of(node, at, depth + 1)} if found else {None}
        return self.names[key]

    def called(self, node: ast.Call, call: Call, depth: int) -> Sources:
        """Return the sources of a call's result."""
        if sources := self.loaded(call):
            return sources
        if function := self.program.functions.get(call.name):
            if call.name not in self.results:
                self.results[call.name] = set()  # a function that returns its own result adds nothing
                self.results[call.name] = self.all_of(self.returned.get(function, ()), function, depth)
            return self.results[call.name]
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        method = [owner] if owner and call.base not in self.program.aliases else []
        given = [*method, *node.args, *(k.value for k in node.keywords)]
        if call.last in _KEEP:
            named = [k.value for k in node.keywords if k.arg in {"datasets", "dsets"}]
            return self.all_of([*named, *given, None][:1], call.scope, depth)
        sized = call.name == "list" or call.name.startswith("datasets.Dataset.")
        return {False} if sized or self.all_of(given, call.scope, depth) <= {False} else {None}
