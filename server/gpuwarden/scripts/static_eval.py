"""Evaluate a Python program statically: its calls, and the constants that reach them.

Names are followed through assignments, parameters with one caller, argparse and dataclass defaults, the environment
and the arguments of the job. An undetermined value is `UNKNOWN`, which equals nothing. The tree is walked with a list,
never by recursion, so that no depth of nesting overflows anything.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

Scope: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | None"
_DEPTH = 25
_STEPS = 200_000  # evaluations in one program; a chain of doublings must not take forever
_LONG = 4_000
_ARGS = frozenset(
    {"args", "opt", "opts", "flags", "FLAGS", "script_args", "training_args", "model_args", "cfg", "config"}
)
_FIELD = frozenset({"field", "Field"})  # dataclasses and pydantic: the default is an argument


class Unknowable(Enum):
    """The unknown value."""

    UNKNOWN = "unknown"


UNKNOWN = Unknowable.UNKNOWN


@dataclass(frozen=True)
class Call:
    """One call. `name` is the dotted name with imports resolved; a method of a variable is `.method` on `base`.

    `open` says that further arguments may come from a `*` or `**` whose content is unknown.
    """

    name: str
    line: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    base: str = ""
    open: bool = False
    node: ast.Call | None = field(default=None, repr=False, compare=False)
    scope: Scope = field(default=None, repr=False, compare=False)

    @property
    def last(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition(".")[2]

    def get(self, name: str, position: int | None = None, default: Any = None) -> Any:
        """Return an argument by name or position; `default` when it is surely absent, UNKNOWN when it may be hidden."""
        if name in self.kwargs:
            return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return UNKNOWN if self.open else default


class Program:
    """A parsed program with its environment and arguments."""

    def __init__(self, tree: ast.Module, env: Mapping[str, str] | None = None, argv: Sequence[str] = ()) -> None:
        self.tree = tree
        self.env = env or {}
        self.flags = flags(argv)
        self.nodes: list[tuple[ast.AST, Scope]] = []
        self.optional: set[int] = set()
        self.aliases: dict[str, str] = {}
        self._parents: dict[int, Scope] = {}
        self._assigned: dict[tuple[int, str], list[ast.expr | None]] = {}
        self._fields: dict[str, list[ast.expr | None]] = {}
        self._by_name: dict[str, list[ast.Call]] = {}
        self._functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self._around: dict[int, Scope] = {}
        self._busy: set[int] = set()
        self._steps = 0
        stack: list[tuple[ast.AST, Scope, bool]] = [(tree, None, False)]
        while stack:
            node, scope, guarded = stack.pop()
            self.nodes.append((node, scope))
            if guarded:
                self.optional.add(id(node))
            inner = scope
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
                self._parents[id(node)] = scope
                inner = node
            soft = _guarded(node)
            stack += [(n, inner, guarded or id(n) in soft) for n in reversed([*ast.iter_child_nodes(node)])]
        self._collect()
        self.calls = tuple(
            self._call(name, node, scope)
            for node, scope in self.nodes
            if isinstance(node, ast.Call) and (name := self.dotted(node.func))
        )

    def _collect(self) -> None:
        """Note imports, assignments, functions and calls."""
        for node, scope in self.nodes:
            match node:
                case ast.Import():
                    for alias in node.names:
                        root = alias.name.partition(".")[0]  # `import a.b` binds `a`
                        self.aliases[alias.asname or root] = alias.name if alias.asname else root
                case ast.ImportFrom() if node.module and not node.level:
                    self.aliases.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
                case ast.Assign():
                    for target in node.targets:
                        self._assign(target, node.value, scope)
                case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                    self._assign(node.target, node.value, scope)
                case ast.AugAssign() | ast.For() | ast.AsyncFor() | ast.comprehension():
                    self._assign(node.target, None, scope)
                case ast.withitem() if node.optional_vars is not None:
                    self._assign(node.optional_vars, None, scope)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._functions[node.name] = node
                case ast.Call():
                    self._around[id(node)] = scope
                    self._note_call(node)

    def _assign(self, target: ast.AST, value: ast.expr | None, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            self._assigned.setdefault((id(scope) if scope else 0, target.id), []).append(value)
            if isinstance(scope, ast.ClassDef):
                default = value
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _FIELD:
                    default = next((k.value for k in value.keywords if k.arg == "default"), None)
                self._fields.setdefault(target.id, []).append(default)
        elif isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for n, inner in enumerate(target.elts):
                self._assign(inner, value.elts[n] if same and isinstance(value, ast.Tuple | ast.List) else None, scope)

    def _note_call(self, node: ast.Call) -> None:
        """Note a call by name, and the default of an option that `add_argument` declares."""
        if isinstance(node.func, ast.Name):
            self._by_name.setdefault(node.func.id, []).append(node)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            dest = next(
                (k.value.value for k in node.keywords if k.arg == "dest" and isinstance(k.value, ast.Constant)), None
            )
            long = next((n for n in names if n.startswith("--")), names[0] if names else "")
            default = next((k.value for k in node.keywords if k.arg == "default"), None)
            self._fields.setdefault(str(dest or long.lstrip("-").replace("-", "_")), []).append(default)

    # --------------------------------------------------------------------------------------------------- values

    def value(self, node: ast.AST | None, scope: Scope = None, depth: int = 0) -> Any:
        """Return the constant that an expression has, or UNKNOWN."""
        self._steps += 1
        if node is None or depth > _DEPTH or self._steps > _STEPS or id(node) in self._busy:
            return UNKNOWN
        self._busy.add(id(node))
        try:
            value = self._value(node, scope, depth + 1)
        finally:
            self._busy.discard(id(node))
        return UNKNOWN if isinstance(value, str) and len(value) > _LONG else value

    def _value(self, node: ast.AST, scope: Scope, depth: int) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(e, scope, depth) for e in node.elts]
            case ast.Dict():
                keys = [self.value(k, scope, depth) for k in node.keys]
                return {
                    k: self.value(v, scope, depth) for k, v in zip(keys, node.values, strict=True) if isinstance(k, str)
                }
            case ast.Name():
                return self._name(node.id, scope, depth)
            case ast.Attribute():
                return self._attribute(node, scope, depth)
            case ast.Subscript():
                return self._subscript(node, scope, depth)
            case ast.JoinedStr():
                parts = [
                    self.value(v.value if isinstance(v, ast.FormattedValue) else v, scope, depth) for v in node.values
                ]
                return UNKNOWN if UNKNOWN in parts else "".join(map(str, parts))
            case ast.BinOp():
                return _arithmetic(node.op, self.value(node.left, scope, depth), self.value(node.right, scope, depth))
            case ast.UnaryOp():
                return _unary(node.op, self.value(node.operand, scope, depth))
            case ast.BoolOp(op=ast.Or()):
                values = [self.value(v, scope, depth) for v in node.values]
                return next(filter(None, values), values[-1])  # UNKNOWN is true
            case ast.Call():
                return self._called(node, scope, depth)
        return UNKNOWN

    def _name(self, name: str, scope: Scope, depth: int) -> Any:
        while True:
            found = self._assigned.get((id(scope) if scope else 0, name))
            if found is not None and not isinstance(scope, ast.ClassDef):
                return _same([self.value(v, scope, depth) for v in found])
            if scope is None:
                return UNKNOWN
            if name in _parameters(scope):
                return self._parameter(name, scope, depth)
            scope = self._parents.get(id(scope))

    def _parameter(self, name: str, scope: Scope, depth: int) -> Any:
        """Return a parameter's value: what every caller passes, or its default where nobody calls by name."""
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            return UNKNOWN
        names = _parameters(scope)
        positional = [a.arg for a in (*scope.args.posonlyargs, *scope.args.args)]
        late = dict(zip(reversed(positional), reversed(scope.args.defaults), strict=False))
        by_keyword = {a.arg: d for a, d in zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True)}
        default = late.get(name) or by_keyword.get(name)
        if name.replace("-", "_") in self.flags and not self._by_name.get(scope.name):
            return self.flags[name]
        values = []
        for call in self._by_name.get(scope.name, ()):
            keyword = next((k.value for k in call.keywords if k.arg == name), None)
            at = names.index(name)
            given = keyword or (call.args[at] if at < len(call.args) else default)
            values.append(self.value(given, None, depth))
        return _same(values) if values else self.value(default, None, depth)

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Any:
        base = node.value
        if isinstance(base, ast.Name) and node.attr in self._fields and self.aliases.get(base.id) is None:
            if node.attr in self.flags:
                return self.flags[node.attr]
            return _same([self.value(v, None, depth) for v in self._fields[node.attr]])
        if isinstance(base, ast.Name) and base.id in _ARGS and node.attr in self.flags:
            return self.flags[node.attr]
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, scope: Scope, depth: int) -> Any:
        key = self.value(node.slice, scope, depth)
        if self.dotted(node.value) == "os.environ" and isinstance(key, str):
            return self.env.get(key, UNKNOWN)
        held = self.value(node.value, scope, depth)
        if isinstance(held, dict) and isinstance(key, str):
            return held.get(key, UNKNOWN)
        if isinstance(held, list | str) and isinstance(key, int) and -len(held) <= key < len(held):
            return held[key]
        return UNKNOWN

    def _called(self, node: ast.Call, scope: Scope, depth: int) -> Any:
        name = self.dotted(node.func)
        args = [self.value(a, scope, depth) for a in node.args]
        if name in {"os.environ.get", "os.getenv"} and args and isinstance(args[0], str):
            default = next((self.value(k.value, scope, depth) for k in node.keywords if k.arg == "default"), None)
            return self.env.get(args[0], args[1] if len(args) > 1 else default)
        if name in {"str", "int", "float", "dict", "pathlib.Path"} and len(args) <= 1:
            if name == "dict":
                return {k.arg: self.value(k.value, scope, depth) for k in node.keywords if k.arg}
            try:
                return {"str": str, "int": int, "float": float, "pathlib.Path": str}[name](args[0])
            except (IndexError, ValueError, TypeError, OverflowError):
                return UNKNOWN
        return UNKNOWN

    def passed(self, node: ast.AST | None, scope: Scope) -> list[tuple[Any, int]]:
        """Return the values, with lines, that callers pass for a parameter of the function around; empty for anything
        else.
        """
        if not (isinstance(node, ast.Name) and isinstance(scope, ast.FunctionDef) and node.id in _parameters(scope)):
            return []
        at = _parameters(scope).index(node.id)
        found = []
        for call in self._by_name.get(scope.name, ()):
            given = next(
                (k.value for k in call.keywords if k.arg == node.id), call.args[at] if at < len(call.args) else None
            )
            found.append((self.value(given, self._around.get(id(call))), call.lineno))
        return found

    # ---------------------------------------------------------------------------------------------------- calls

    def dotted(self, node: ast.AST) -> str:
        """Return the dotted name of an expression, imports resolved; `.method` on a variable; else empty."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        rest = "".join("." + p for p in reversed(parts))
        if isinstance(node, ast.Name):
            known = self.aliases.get(node.id)
            if known is not None:
                return known + rest
            return rest or node.id
        return rest

    def _call(self, name: str, node: ast.Call, scope: Scope) -> Call:
        kwargs = {k.arg: self.value(k.value, scope) for k in node.keywords if k.arg}
        hidden = any(isinstance(a, ast.Starred) for a in node.args)
        for keyword in node.keywords:
            if keyword.arg is None:
                more = self.value(keyword.value, scope)
                hidden = hidden or not isinstance(more, dict)
                kwargs = (more if isinstance(more, dict) else {}) | kwargs
        args = tuple(self.value(a, scope) for a in node.args if not isinstance(a, ast.Starred))
        base = node.func
        while isinstance(base, ast.Attribute):
            base = base.value
        return Call(name, node.lineno, args, kwargs, base.id if isinstance(base, ast.Name) else "", hidden, node, scope)


def flags(argv: Sequence[str]) -> dict[str, Any]:
    """Return the options of a command line (`--name value`, `--name=value`, `--name`), with dashes as underscores."""
    found: dict[str, Any] = {}
    for n, word in enumerate(argv):
        if word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            following = argv[n + 1] if n + 1 < len(argv) and not argv[n + 1].startswith("--") else None
            found[name.replace("-", "_")] = (
                _literal(value) if given else True if following is None else _literal(following)
            )
    return found


def _literal(text: str) -> Any:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for cast in (int, float):
        try:
            return cast(text)
        except ValueError:
            continue
    return text


def _guarded(node: ast.AST) -> set[int]:
    """Return the children of a node that may fail or be skipped without harm: `try: import x`, `if TYPE_CHECKING:`."""
    if isinstance(node, ast.Try):
        types = [n for h in node.handlers if h.type is not None for n in ast.walk(h.type)]
        caught = {n.id for n in types if isinstance(n, ast.Name)}
        bare = any(h.type is None for h in node.handlers)
        if bare or caught & {"ImportError", "ModuleNotFoundError", "Exception"}:
            return {id(n) for n in (*node.body, *node.handlers)}
    if isinstance(node, ast.If):
        test = node.test
        name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
        return {id(n) for n in node.body} if name == "TYPE_CHECKING" else set()
    return set()


def _parameters(scope: Scope) -> list[str]:
    if scope is None or isinstance(scope, ast.ClassDef):
        return []
    return [a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]


def _same(values: list[Any]) -> Any:
    """Return the one value that all have, or UNKNOWN."""
    if not values or any(v is UNKNOWN for v in values):
        return UNKNOWN
    return values[0] if all(v == values[0] for v in values) else UNKNOWN


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Add):
        return left + right
    if isinstance(left, str) and isinstance(right, str) and isinstance(op, ast.Div):
        return f"{left}/{right}"  # a path
    if not (isinstance(left, int | float) and isinstance(right, int | float)):
        return UNKNOWN
    try:
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return left // right
    except (ArithmeticError, ValueError):
        return UNKNOWN
    return UNKNOWN


def _unary(op: ast.unaryop, value: Any) -> Any:
    if isinstance(op, ast.Not) and value is not UNKNOWN:
        return not value
    return -value if isinstance(op, ast.USub) and isinstance(value, int | float) else UNKNOWN
