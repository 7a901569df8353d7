"""Evaluate a Python program statically: its calls, and the constants that are passed to them.

Names are resolved through assignments, parameters to which every caller passes the same value, argparse and dataclass
defaults, the job's environment and the job's arguments. A value that can't be determined is `UNKNOWN`. Branches whose
condition is false are omitted; code under a condition that can't be determined is marked in `maybe`.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any

from gpuwarden.static_analysis.declared_options import Option, flags, given_value, names_a_file
from gpuwarden.static_analysis.survey import Function, Scope, Survey
from gpuwarden.static_analysis.three_valued import (
    UNKNOWN,
    arithmetic,
    bounded,
    compared,
    decided,
    either,
    known,
    same,
    text_method,
    truth,
    unary,
)

__all__ = ["SETTINGS", "UNKNOWN", "Call", "Program", "flags"]

_DEPTH = 25
_STEPS = 200_000  # maximum number of evaluations per program; limits the time for values that double repeatedly
_ROUNDS = 4  # omitting a branch can make another condition known
SETTINGS = ("args", "opt", "opts", "flags", "FLAGS", "cfg", "conf", "config", "hparams")
_PARSES = frozenset({"parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config", "cli"})
_CONFIGURED = frozenset({"parse_args_and_config", "parse_args_into_dataclasses", "parse_json_file", "parse_yaml_file"})
_LIBRARY_DEFAULTS = {"push_to_hub": False, "use_peft": False, "do_predict": False}
# Launchers, images and platforms may set these variables, so one that the job does not set is UNKNOWN.
_AROUND = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "NODE_", "CUDA_", "SLURM_", "HF_", "HOME", "USER", "PATH", "TMP")


@dataclass(frozen=True)
class Call:
    """One call. `name` is the dotted name with imports resolved; a method of a variable is `.method` on `base`.

    `open` is true if a `*` or `**` with unknown content may pass more arguments. `maybe` is true if the call runs only
    under an unknown condition, `tried` if the program continues after a failure, and `unusual` if it is tried or if the
    condition may be false on a new machine with a GPU.
    """

    name: str
    line: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    base: str = ""
    open: bool = False
    node: ast.Call | None = field(default=None, repr=False, compare=False)
    scope: Scope = field(default=None, repr=False, compare=False)
    maybe: bool = field(default=False, compare=False)
    tried: bool = field(default=False, compare=False)
    unusual: bool = field(default=False, compare=False)
    owner: str = field(default="", compare=False)
    """The variable whose own method is called, unlike `base`: empty for `a.b.method()`."""

    @property
    def certain(self) -> bool:
        """Return true if the program always runs the call, and fails if the call fails."""
        return not self.maybe and not self.tried

    @property
    def last(self) -> str:
        """Return the last part of the name."""
        return self.name.rpartition(".")[2]

    def get(self, name: str, position: int | None = None, default: Any = None) -> Any:
        """Return an argument by name or position; `default` if it is absent, or UNKNOWN if `*` or `**` may hide it."""
        if name in self.kwargs:
            return self.kwargs[name]
        if position is not None and position < len(self.args):
            return self.args[position]
        return UNKNOWN if self.open else default


class Program:
    """A parsed program with its environment and arguments.

    `nodes` contains the parts that can run, with their scopes. The parts in `optional` may fail or be skipped without
    harm. The parts in `maybe` depend on an unknown condition. If a part in `tried` fails, the program continues.
    `rewrites` is true if the program may set its own arguments, which are then unknown; `given` contains the flags that
    remain. `configured` is true if any setting may be given in a file or in such arguments.
    """

    def __init__(self, tree: ast.Module, env: Mapping[str, str] | None = None, argv: Sequence[str] = ()) -> None:
        self.tree = tree
        self.env = env or {}
        self._argv = tuple(argv)
        self._steps = 0
        branches: dict[int, bool] = {}
        for _ in range(_ROUNDS):
            self._look(Survey(tree, branches))
            found = branches | dict(self._decisions())
            if found == branches:
                break
            branches = found
        else:
            self._look(Survey(tree, branches))
        called = ((node, scope) for node, scope in self.nodes if isinstance(node, ast.Call))
        self.calls = tuple(call for node, scope in called if (call := self._call(node, scope)).name)

    def _look(self, survey: Survey) -> None:
        """Use a new survey, and discard the values that were computed from the previous one."""
        self._survey = survey
        self.nodes, self.optional, self.maybe, self.tried = survey.nodes, survey.optional, survey.maybe, survey.tried
        self.rewrites = self._sets_arguments()
        self.argv = () if self.rewrites else self._argv
        self.given = {} if self.rewrites and survey.drops else flags(self._argv)
        self.flags = flags(self.argv)
        self.configured = self.rewrites or names_a_file(self.argv)
        self.aliases, self.classes, self.functions = survey.aliases, survey.classes, survey.functions
        self._busy: set[int] = set()
        self._memo: dict[tuple[int, int], Any] = {}
        self._names: dict[tuple[int, str], Any] = {}
        self._cuts = 0
        called = ((n.func, n) for n, _ in self.nodes if isinstance(n, ast.Call))
        self._methods = {func.attr: n for func, n in called if isinstance(func, ast.Attribute)}

    def _sets_arguments(self) -> bool:
        """Return true if the program may change `sys.argv` before it reads its arguments."""
        if not self._survey.rewrites:
            return False
        calls = ((n, scope) for n, scope in self.nodes if isinstance(n, ast.Call))
        parses = {scope: n.lineno for n, scope in calls if self.dotted(n.func).rpartition(".")[2] in _PARSES}
        after = (line > parses.get(scope, line) for line, scope in self._survey.rewrites)
        return not (len(parses) == 1 and all(after))

    def _decisions(self) -> Iterator[tuple[int, bool]]:
        """Yield the id of each condition whose truth value is known, with that value."""
        for node, scope in self.nodes:
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                true = self.holds(node.test, scope)
                if true is not None and not (true and isinstance(node, ast.While)):
                    yield id(node), true

    @cached_property
    def makers(self) -> Mapping[str, frozenset[str]]:
        """Map each variable to the dotted names of the calls whose results are assigned to it."""
        found: dict[str, set[str]] = {}
        for node, _ in self.nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=func)):
                    found.setdefault(name, set()).add(self.dotted(func))
        return {name: frozenset(names) for name, names in found.items()}

    # ---------------------------------------------------------------------------------------------------- values

    def holds(self, node: ast.expr, scope: Scope) -> bool | None:
        """Return whether a condition is true; None if its value is unknown."""
        match node:
            case ast.BoolOp():
                return decided([self.holds(v, scope) for v in node.values], stops=isinstance(node.op, ast.Or))
            case ast.UnaryOp(op=ast.Not()):
                true = self.holds(node.operand, scope)
                return None if true is None else not true
            case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()]):
                return True
            case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
                return False
        return truth(self.value(node, scope))

    def value(self, node: ast.AST | None, scope: Scope = None, depth: int = 0) -> Any:
        """Return the constant value of an expression, or UNKNOWN."""
        if node is None:
            return UNKNOWN
        self._steps += 1
        key = (id(node), id(scope))
        if key in self._memo:
            return self._memo[key]
        if depth > _DEPTH or self._steps > _STEPS or id(node) in self._busy:
            self._cuts += 1
            return UNKNOWN
        cuts = self._cuts
        self._busy.add(id(node))
        try:
            value = bounded(self._value(node, scope, depth + 1))
        finally:
            self._busy.discard(id(node))
        if cuts == self._cuts:  # no limit stopped the evaluation
            self._memo[key] = value
        return value

    def _value(self, node: ast.AST, scope: Scope, depth: int) -> Any:
        match node:
            case ast.Constant():
                return UNKNOWN if node.value is Ellipsis else node.value
            case ast.Dict():
                return self._dict(node, scope, depth)
            case ast.Name():
                return self._name(node.id, scope, depth)
            case ast.Attribute():
                return self._attribute(node, scope, depth)
            case ast.Subscript():
                return self._subscript(node, scope, depth)
            case ast.JoinedStr():
                return self._joined(node, scope, depth)
            case ast.Call():
                return self._called(node, scope, depth)
        return self._operated(node, scope, depth)

    def _operated(self, node: ast.AST, scope: Scope, depth: int) -> Any:
        """Return the value of an expression that combines other expressions."""

        def of(inner: ast.AST) -> Any:
            return self.value(inner, scope, depth)

        match node:
            case ast.List() | ast.Tuple() | ast.Set():
                return UNKNOWN if any(isinstance(e, ast.Starred) for e in node.elts) else [of(e) for e in node.elts]
            case ast.NamedExpr():
                return of(node.value)
            case ast.BinOp():
                return arithmetic(node.op, of(node.left), of(node.right))
            case ast.UnaryOp():
                return unary(node.op, of(node.operand))
            case ast.BoolOp():
                return either([of(v) for v in node.values], stops=isinstance(node.op, ast.Or))
            case ast.Compare(ops=[op], comparators=[right]):
                return compared(op, of(node.left), of(right))
            case ast.IfExp():
                true = self.holds(node.test, scope)
                return (
                    same([of(node.body), of(node.orelse)]) if true is None else of(node.body if true else node.orelse)
                )
        return UNKNOWN

    def _dict(self, node: ast.Dict, scope: Scope, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name, inner = (self.value(n, scope, depth) for n in (key, value))
            if key is None and isinstance(inner, dict):
                found |= inner
            elif isinstance(name, str | int | float | bool | None) and key is not None:
                found[name] = inner
            else:
                return UNKNOWN
        return found

    def _joined(self, node: ast.JoinedStr, scope: Scope, depth: int) -> Any:
        parts = []
        for part in node.values:
            shown = isinstance(part, ast.FormattedValue)
            if isinstance(part, ast.FormattedValue) and (part.format_spec is not None or part.conversion != -1):
                return UNKNOWN
            value = self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope, depth)
            if not known(value) or (shown and not isinstance(value, str | int | float | None)):
                return UNKNOWN
            parts.append(str(value))
        return "".join(parts)

    def _name(self, name: str, scope: Scope, depth: int) -> Any:
        key = (id(scope), name)
        if key not in self._names:
            cuts = self._cuts
            value = self._looked_up(name, scope, depth)
            if cuts != self._cuts:
                return value
            self._names[key] = value
        return self._names[key]

    def _looked_up(self, name: str, scope: Scope, depth: int) -> Any:
        while True:
            found = self._survey.assigned.get((id(scope) if scope else 0, name))
            given = [self._parameter(name, scope, depth)] if name in _parameters(scope) else []
            if (found is not None or given) and not isinstance(scope, ast.ClassDef):
                if scope is None and self._survey.executes:
                    return UNKNOWN  # `exec` or `globals()` may have changed it
                value = same([*given, *(self.value(v, scope, depth) for v in found or ())])
                return UNKNOWN if isinstance(value, list | dict) and name in self._survey.mutated else value
            if scope is None:
                return UNKNOWN
            scope = self._survey.parents.get(id(scope))

    def _parameter(self, name: str, scope: Scope, depth: int) -> Any:
        """Return the value that every caller passes for a parameter; the default if the function has no caller."""
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            return UNKNOWN
        if not self._survey.by_name.get(scope.name) and (name in self.flags or self.rewrites):
            return self.flags.get(name, UNKNOWN)
        values = [self.value(value, where, depth) for value, where, _ in self._given(name, scope)]
        return same(values) if values else self.value(_default(name, scope), None, depth)

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Any:
        """Return the value of a declared option, such as `args.lr` or `Config.lr`."""
        base = node.value
        if not isinstance(base, ast.Name) or base.id in self.aliases or not self._holds_settings(base.id, scope):
            return UNKNOWN
        options = self._survey.options.get(node.attr, [])
        values = [self._option(o, node.attr, depth) for o in options]
        if not options:
            values = [self.flags[node.attr]] if node.attr in self.flags else [*self._library_option(node.attr, depth)]
        values += [self.value(v, where, depth) for v, where in self._survey.stores.get(node.attr, ())]
        return same([*values, *self._overrides(node.attr, depth)])

    def option(self, name: str) -> Any:
        """Return the given value of an option, or its declared default; None if the program does not declare it."""
        if name in self.flags:
            return self.flags[name]
        options = self._survey.options.get(name, ())
        return same([self._option(o, name, 0) for o in options]) if options else None

    def _library_option(self, name: str, depth: int) -> Iterator[Any]:
        """Yield the values of a library's option: those given in its configurations, or else its default."""
        if name not in _LIBRARY_DEFAULTS or self.configured:
            yield UNKNOWN
            return
        calls = [
            (n, scope)
            for n, scope in self.nodes
            if isinstance(n, ast.Call) and self.dotted(n.func).endswith(("TrainingArguments", "Config"))
        ]
        given = [(k.value, scope) for n, scope in calls for k in n.keywords if k.arg == name]
        if any(k.arg is None for n, _ in calls for k in n.keywords):
            yield UNKNOWN
        yield from (self.value(value, scope, depth) for value, scope in given)
        if not given:
            yield _LIBRARY_DEFAULTS[name]

    def _holds_settings(self, name: str, scope: Scope) -> bool:
        """Return true if a variable refers to parsed arguments or to an instance of a settings class."""
        if name.endswith(SETTINGS) or name in self.classes:
            return True
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and name in _parameters(scope):
            return name != "self"
        found = [v for (_, bound), values in self._survey.assigned.items() if bound == name for v in values]
        called = [self.dotted(v.func).rpartition(".")[2] for v in found if isinstance(v, ast.Call)]
        return bool(called) and all(c in _PARSES or c in self.classes for c in called)

    def _option(self, option: Option, name: str, depth: int) -> Any:
        given = given_value(option, name, self.argv, self.flags)
        if given is not None:
            return given
        calls = self._methods
        if (self.rewrites and (option.words or _PARSES & calls.keys())) or (
            _CONFIGURED & calls.keys() and self.configured
        ):
            return UNKNOWN
        parse = calls.get("parse_args")
        if parse is not None and parse.args and self.dotted(parse.args[0]) != "sys.argv":
            return UNKNOWN  # the call parses a list in the script, not the command line
        return option.fixed if option.default is None else self.value(option.default, None, depth)

    def _overrides(self, name: str, depth: int) -> Iterator[Any]:
        """Yield the values that calls to the program's own classes pass for a field."""
        for title, node in self.classes.items():
            if not any(
                isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and s.target.id == name
                for s in node.body
            ):
                continue
            for call in self._survey.by_name.get(title, ()):
                if call.args or any(k.arg is None for k in call.keywords):
                    yield UNKNOWN
                yield from (self.value(k.value, None, depth) for k in call.keywords if k.arg == name)

    def _subscript(self, node: ast.Subscript, scope: Scope, depth: int) -> Any:
        key = self.value(node.slice, scope, depth)
        if self.dotted(node.value) == "os.environ" and isinstance(key, str):
            return self._variable(key, UNKNOWN)
        container = self.value(node.value, scope, depth)
        if isinstance(container, dict) and isinstance(key, str):
            return container.get(key, UNKNOWN)
        if isinstance(container, list | str) and isinstance(key, int) and -len(container) <= key < len(container):
            return container[key]
        return UNKNOWN

    def _variable(self, name: str, default: Any) -> Any:
        """Return the value of an environment variable; UNKNOWN if the program or the platform may set it."""
        if {name, "*"} & self._survey.written:
            return UNKNOWN
        return self.env.get(name, UNKNOWN if name.startswith(_AROUND) else default)

    def _called(self, node: ast.Call, scope: Scope, depth: int) -> Any:
        """Return the value of a call to a function without side effects."""
        name = self.dotted(node.func)
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            return UNKNOWN
        args = [self.value(a, scope, depth) for a in node.args]
        if name in {"os.environ.get", "os.getenv"} and args and isinstance(args[0], str):
            default = next((self.value(k.value, scope, depth) for k in node.keywords if k.arg == "default"), None)
            return self._variable(args[0], args[1] if len(args) > 1 else default)
        if name == "trl.get_peft_config":
            return UNKNOWN if self.flags.get("use_peft") or self.configured else None
        if name == "dict" and not args:
            return {k.arg: self.value(k.value, scope, depth) for k in node.keywords if k.arg}
        if node.keywords or name in self._survey.functions:
            return UNKNOWN
        if name in {"os.path.join", "pathlib.Path"} and args and all(isinstance(a, str) for a in args):
            return posixpath.join(*args)
        if name in _PLAIN and len(args) == 1 and known(args[0]):
            try:
                return _PLAIN[name](args[0])
            except (ValueError, TypeError, OverflowError):
                return UNKNOWN
        if isinstance(node.func, ast.Attribute):
            text = self.value(node.func.value, scope, depth)
            if isinstance(text, str):
                return text_method(text, node.func.attr, args)
        return UNKNOWN

    def passed(self, node: ast.AST | None, scope: Scope) -> list[tuple[Any, int]]:
        """Return the values that callers pass for a parameter of the enclosing function, each with its line.

        The list is empty if the node is not such a parameter.
        """
        given = self._given(node.id, scope) if isinstance(node, ast.Name) else ()
        return [(self.value(value, where), call.lineno) for value, where, call in given]

    def _given(self, name: str, scope: Scope) -> Iterator[tuple[ast.expr | None, Scope, ast.Call]]:
        """Yield the expression that each call passes for a parameter (or the default), its scope, and the call.

        The expression is None if it is unknown.
        """
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or name not in _parameters(scope):
            return
        at, default = _parameters(scope).index(name), _default(name, scope)
        last = len(scope.args.posonlyargs) + len(scope.args.args)
        for call in self._survey.by_name.get(scope.name, ()):
            if any(k.arg is None for k in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
                yield None, None, call
                continue
            keyword = next((k.value for k in call.keywords if k.arg == name), None)
            given = keyword or (call.args[at] if at < min(last, len(call.args)) else None)
            where = self._survey.around.get(id(call)) if given is not None else self._survey.parents.get(id(scope))
            yield given or default, where, call

    def bound(self, name: str, scope: Scope) -> Iterator[tuple[ast.expr | None, Scope]]:
        """Yield the expressions that are assigned to a variable or passed for a parameter, with their scopes. An
        unknown expression is None. Yields nothing if the name is not a variable.
        """
        scope = self.home(name, scope)
        yield from ((value, scope) for value in self._assigned(name, scope))
        if name in _parameters(scope):
            passed = ((value, where) for value, where, _ in self._given(name, scope))
            yield from chain([first], passed) if (first := next(passed, None)) else [(None, scope)]

    def home(self, name: str, scope: Scope) -> Scope:
        """Return the scope that binds a variable when it is read in `scope`."""
        while scope is not None:
            seen = not isinstance(scope, ast.ClassDef)  # methods can't access the variables in their class body
            if seen and (self._assigned(name, scope) or name in _parameters(scope)):
                break
            scope = self._survey.parents.get(id(scope))
        return scope

    def _assigned(self, name: str, scope: Scope) -> Sequence[ast.expr | None]:
        return self._survey.assigned.get((id(scope) if scope else 0, name), ())

    # ---------------------------------------------------------------------------------------------------- calls

    def dotted(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with imports resolved, or `.method` for a method of a variable.

        The name is empty for any other expression.
        """
        return self._survey.dotted(node)

    def _partial(self, func: ast.expr, scope: Scope) -> tuple[ast.Call, Scope] | None:
        """Return the `functools.partial` call that creates a function, and the call's scope; None for others."""
        found = [*islice(self.bound(func.id, scope), 2)] if isinstance(func, ast.Name) else [(func, scope)]
        match found:
            case [(ast.Call(func=maker, args=[_, *_]) as made, where)] if self.dotted(maker) == "functools.partial":
                return made, where
        return None

    def _call(self, node: ast.Call, scope: Scope) -> Call:
        func = node.func
        given, keywords = [(a, scope) for a in node.args], [(k, scope) for k in node.keywords]
        if (partial := self._partial(func, scope)) is not None:
            made, where = partial
            func, given = made.args[0], [*((a, where) for a in made.args[1:]), *given]
            keywords = [*((k, where) for k in made.keywords), *keywords]
        kwargs = {k.arg: self.value(k.value, at) for k, at in keywords if k.arg}
        hidden = any(isinstance(a, ast.Starred) for a, _ in given)
        for keyword, at in keywords:
            if keyword.arg is None:
                more = self.value(keyword.value, at)
                hidden = hidden or not isinstance(more, dict)
                kwargs = (
                    {k: v for k, v in more.items() if isinstance(k, str)} if isinstance(more, dict) else {}
                ) | kwargs
        args = tuple(self.value(a, at) for a, at in given if not isinstance(a, ast.Starred))
        base = func
        while isinstance(base, ast.Attribute):
            base = base.value
        root = base.id if isinstance(base, ast.Name) else ""
        owner = root if isinstance(func, ast.Attribute) and func.value is base else ""
        maybe, tried, unusual = (id(node) in parts for parts in (self.maybe, self.tried, self._survey.unusual))
        name = self.dotted(func)
        return Call(name, node.lineno, args, kwargs, root, hidden, node, scope, maybe, tried, unusual, owner)


def _parameters(scope: Scope) -> list[str]:
    if scope is None or isinstance(scope, ast.ClassDef):
        return []
    return [a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)]


def _default(name: str, scope: Function) -> ast.expr | None:
    """Return a parameter's default."""
    given = scope.args
    late = zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults), strict=False)
    return next((d for a, d in (*late, *zip(given.kwonlyargs, given.kw_defaults, strict=True)) if a.arg == name), None)


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "len": len,
    "list": list,
    "tuple": list,
}
