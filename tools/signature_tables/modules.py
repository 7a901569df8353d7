"""Read the names, classes and functions that one Python module defines, from its text.

Nothing is imported or executed. A module is *open* if it may have names that its text does not show.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

REQUIRED = None
"""The value of `default` for a parameter without a default."""
_EXPRESSION = "..."
_LONG = 60


@dataclass(frozen=True)
class Parameter:
    """One parameter: the default as Python text (`...` for an expression), and the names in its annotation."""

    name: str
    default: str | None = REQUIRED
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass
class Definition:
    """A class or a function as defined in its own text, without inherited members.

    `kind`: `function`, `init` (its own `__init__`), `dataclass`, `enum` or `plain`. `renames` maps an old argument to
    the new one, or to an empty string. `checked` contains the parameters whose values the class itself checks against
    an enum.
    """

    kind: str
    bases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    open: bool = False
    renames: dict[str, str] = field(default_factory=dict)
    checked: frozenset[str] = frozenset()


@dataclass
class Module:
    """The bindings of one module. A target is a qualified name; `stars` contains the modules that it imports with `*`.

    `moved` maps former module paths to the new ones, if the module installs a finder that still supports them.
    """

    name: str
    is_package: bool
    bindings: dict[str, str] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    definitions: dict[str, Definition] = field(default_factory=dict)
    exported: list[str] | None = None
    strings: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)
    lazy: bool = False
    open: bool = False


def exported_only(name: str, text: str) -> Module:
    """Return an open module for which only `__all__` is read."""
    found = re.search(r"^__all__\s*=\s*(\[[^\]]*\])", text, re.MULTILINE)
    try:
        exported = [e for e in ast.literal_eval(found[1]) if isinstance(e, str)] if found else None
    except (ValueError, SyntaxError):
        exported = None
    return Module(name, False, {e: f"{name}.{e}" for e in exported or ()}, exported=exported, open=True)


def read_module(name: str, text: str, *, is_package: bool) -> Module:
    """Return the bindings and definitions in a module's text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    module = Module(name, is_package, lazy="_LazyModule" in text)
    return _Reader(module, tree, announces="deprecated" in text, finds="sys.meta_path" in text).module


class _Reader:
    """One pass over the statements of a module, including those inside `if`, `try` and `with`."""

    def __init__(self, module: Module, tree: ast.Module, *, announces: bool, finds: bool) -> None:
        self.module = module
        self.announces = announces
        self.finds = finds
        for node in tree.body:
            self._statement(node, typing_only=False)
        if "." not in module.name:
            self.module.strings = {
                n.value
                for n in ast.walk(tree)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and len(n.value) < _LONG
            }

    def _statement(self, node: ast.stmt, *, typing_only: bool) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, typing_only)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if not typing_only:
                self._definition(node)
            case ast.Assign():
                for target in node.targets:
                    self._assignment(target, node.value, typing_only)
            case ast.AnnAssign() | ast.AugAssign():
                self._assignment(node.target, node.value, typing_only)
            case ast.Expr(value=ast.Call(func=func, args=args)):
                self._call(ast.unparse(func), args)
            case ast.If():
                only = typing_only or "TYPE_CHECKING" in ast.unparse(node.test)
                self._statements(node.body, only)
                self._statements(node.orelse, typing_only)
            case ast.Try() | ast.With() | ast.For() | ast.While():
                if isinstance(node, ast.For) and "globals()" in ast.unparse(node):
                    self.module.open = True
                handled = [inner for handler in getattr(node, "handlers", ()) for inner in handler.body]
                last = [*getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
                self._statements([*node.body, *last, *handled], typing_only)

    def _statements(self, nodes: Iterable[ast.stmt], typing_only: bool) -> None:
        for node in nodes:
            self._statement(node, typing_only=typing_only)

    def _import(self, node: ast.Import | ast.ImportFrom, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._bind(alias.asname or alias.name.partition(".")[0], alias.name, typing_only)
            return
        source = self._absolute(node)
        for alias in node.names:
            if alias.name == "*":
                self.module.stars.append(source)
            else:
                self._bind(alias.asname or alias.name, f"{source}.{alias.name}", typing_only)

    def _definition(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if isinstance(node, ast.ClassDef):
            self._define(node.name, self._class(node))
        elif node.name == "__getattr__":
            self.module.open = True
        elif not any(ast.unparse(d).rpartition(".")[2] == "overload" for d in node.decorator_list):
            self._define(node.name, _function(node, method=False, qualified=self._qualified))

    def _bind(self, name: str, target: str, typing_only: bool) -> None:
        (self.module.hidden if typing_only and not self.module.lazy else self.module.bindings)[name] = target

    def _define(self, name: str, found: Definition) -> None:
        before = self.module.definitions.get(name)
        if before is not None and before.parameters != found.parameters:
            names = {p.name for p in found.parameters}
            found.parameters += tuple(p for p in before.parameters if p.name not in names)
            found.open = found.open or before.open
        self.module.definitions[name] = found
        self.module.bindings[name] = f"{self.module.name}.{name}"

    def _assignment(self, target: ast.expr, value: ast.expr | None, typing_only: bool) -> None:
        if self.finds and isinstance(value, ast.Dict):
            self._moved(value)
        match target:
            case ast.Name(id="__all__"):
                names = _strings(value)
                self.module.exported = [*(self.module.exported or []), *names]
            case ast.Name(id="_import_structure") | ast.Subscript(value=ast.Name(id="_import_structure")):
                self._lazy_names(target, value)
            case ast.Name(id=name) if not typing_only and name not in self.module.definitions:
                alias = self._qualified(value) if isinstance(value, ast.Name | ast.Attribute) else ""
                self.module.bindings[name] = alias or f"{self.module.name}.{name}"
            case ast.Tuple() | ast.List():
                for part in target.elts:
                    self._assignment(part, None, typing_only)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="globals"))):
                self.module.open = True

    def _call(self, func: str, args: list[ast.expr]) -> None:
        if func.startswith("_import_structure[") and args:
            key = re.match(r"_import_structure\[['\"]([\w.]+)['\"]\]", func)
            for name in _strings(args[0]) if key else ():
                self.module.bindings.setdefault(name, f"{self.module.name}.{key[1]}.{name}" if key else "")
        elif func in {"globals().update", "exec", "setattr"}:
            self.module.open = True

    def _lazy_names(self, target: ast.expr, value: ast.expr | None) -> None:
        """Bind the names in a lazy import structure, which maps a submodule to its names."""
        pairs: Iterable[tuple[ast.expr | None, ast.expr | None]] = ()
        if isinstance(value, ast.Dict):
            pairs = zip(value.keys, value.values, strict=True)
        elif isinstance(target, ast.Subscript):
            pairs = [(target.slice, value)]
        for key, names in pairs:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                self.module.bindings.setdefault(key.value, f"{self.module.name}.{key.value}")
                for name in _strings(names):
                    self.module.bindings.setdefault(name, f"{self.module.name}.{key.value}.{name}")

    def _moved(self, value: ast.Dict) -> None:
        """Store a mapping from former module paths of this package to the new ones."""
        begin = self.module.name.partition(".")[0] + "."
        for key, new in zip(value.keys, value.values, strict=True):
            match key, new:
                case ast.Constant(value=str(old)), ast.Constant(value=str(path)) if old.startswith(
                    begin
                ) and path.startswith(begin):
                    self.module.moved[old] = path

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.name.split(".")
        kept = parts[: len(parts) - node.level + (1 if self.module.is_package else 0)]
        return ".".join([*kept, *([node.module] if node.module else [])])

    def _qualified(self, node: ast.AST) -> str:
        """Return the qualified name of a dotted expression, or an empty string for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        bound = self.module.bindings.get(node.id) or self.module.hidden.get(node.id)
        return ".".join([bound or f"{self.module.name}.{node.id}", *reversed(parts)])

    def _class(self, node: ast.ClassDef) -> Definition:
        bases = tuple(
            self._qualified(base.value if isinstance(base, ast.Subscript) else base) or "?" for base in node.bases
        )
        strange = any(k.arg != "metaclass" or "ABCMeta" not in ast.unparse(k.value) for k in node.keywords)
        body = list(_flat(node.body))
        init = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        new = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__new__"), None)
        if any(base.rpartition(".")[2].endswith(("Enum", "Flag")) for base in bases):
            values = (n.value.value for n in body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant))
            return Definition("enum", bases, tuple(Parameter(v) for v in values if isinstance(v, str)))
        if init is not None or new is not None:
            found = _function(init or new, method=True, qualified=self._qualified)  # type: ignore[arg-type]
            found.kind, found.bases = "init", bases
        elif data := next((d for d in node.decorator_list if "dataclass" in ast.unparse(d)), None):
            hidden = "init=False" in ast.unparse(data)
            found = Definition("dataclass", bases, tuple(self._fields(body)), open=hidden)
        else:
            found = Definition("plain", bases, tuple(self._fields(body)))
        found.open = found.open or strange
        builders = [n for n in body if isinstance(n, ast.FunctionDef) and n.name in {"__init__", "__post_init__"}]
        if self.announces:
            found.renames = {**_deprecations(builders, {p.name for p in found.parameters}), **found.renames}
        found.checked = frozenset(_checked(builders)) if found.kind == "dataclass" else frozenset()
        return found

    def _fields(self, body: list[ast.stmt]) -> Iterator[Parameter]:
        for node in body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            kind = ast.unparse(node.annotation)
            if "ClassVar" in kind:
                continue
            default, choices = node.value, ()
            if isinstance(default, ast.Call) and ast.unparse(default.func).rpartition(".")[2] in {"field", "Field"}:
                given = {k.arg: k.value for k in default.keywords if k.arg}
                if _literal(given.get("init")) == "False":
                    continue
                choices = _choices(given.get("metadata"))
                default = given.get("default", given.get("default_factory"))
                if default is given.get("default_factory") and default is not None:
                    default = ast.Name(id="_")
            yield _parameter(node.target.id, node.annotation, default, choices, self._qualified)


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])
        else:
            yield node


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool, qualified: Any = lambda _: ""
) -> Definition:
    """Return a function's parameters, without the first one if it is a method."""
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    pairs = list(zip(positional, defaults, strict=True))[int(method) :]
    pairs += zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    renames: dict[str, str] = {}
    open_ = spec.kwarg is not None
    for decorator in node.decorator_list:
        text = ast.unparse(decorator)
        if "deprecat" in text.lower() and "arg" in text.lower():
            given = _decorated(decorator)
            open_ = open_ or given is None
            renames |= given or {}
    return Definition(
        "function",
        parameters=tuple(_parameter(a.arg, a.annotation, d, (), qualified) for a, d in pairs),
        open=open_,
        renames=renames,
    )


def _decorated(node: ast.expr) -> dict[str, str] | None:
    """Return the old and new names in a decorator for deprecated arguments; None if it can't be read."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    words = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
    texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
    if name == "deprecated_kwargs":
        return {k: str(v) for k, v in words.items() if isinstance(v, str)} if len(words) == len(node.keywords) else None
    if name == "deprecate_kwarg":
        old = words.get("old_name", texts[0] if texts else None)
        new = words.get("new_name", texts[2] if len(texts) > 2 else None)
        return {old: str(new or "")} if isinstance(old, str) else None
    return {}


def _parameter(
    name: str, annotation: ast.expr | None, default: ast.expr | None, choices: tuple[str, ...], qualified: Any
) -> Parameter:
    kinds: tuple[str, ...] = ()
    if annotation is not None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                annotation = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                annotation = None
        parts = list(_alternatives(annotation))
        literal = [s for part in parts if isinstance(part, list) for s in part]
        names = [part for part in parts if isinstance(part, ast.AST)]
        if literal and not names:
            choices = choices or tuple(literal)
        elif names and not literal:
            kinds = tuple(
                filter(None, (qualified(n) if isinstance(n, ast.Name | ast.Attribute) else "?" for n in names))
            )
    return Parameter(name, REQUIRED if default is None else _literal(default), choices, kinds)


def _alternatives(node: ast.expr | None) -> Iterator[ast.expr | list[str]]:
    """Yield the members of a union except None and str, and the strings of a `Literal` as one list."""
    match node:
        case None | ast.Constant(value=None) | ast.Name(id="str"):
            return
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            yield from _alternatives(left)
            yield from _alternatives(right)
        case ast.Subscript(value=ast.Name(id="Optional" | "Union") | ast.Attribute(attr="Optional" | "Union"), slice=s):
            for part in s.elts if isinstance(s, ast.Tuple) else [s]:
                yield from _alternatives(part)
        case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal"), slice=s):
            values = s.elts if isinstance(s, ast.Tuple) else [s]
            texts = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
            yield texts
            if len(texts) != len([v for v in values if not (isinstance(v, ast.Constant) and v.value is None)]):
                yield ast.Name(id="?")
        case _:
            yield node


def _literal(node: ast.expr | None) -> str:
    try:
        text = repr(ast.literal_eval(node)) if node is not None else _EXPRESSION
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return _EXPRESSION
    return text if len(text) < _LONG else _EXPRESSION


def _choices(metadata: ast.expr | None) -> tuple[str, ...]:
    if isinstance(metadata, ast.Dict):
        for key, value in zip(metadata.keys, metadata.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "choices":
                return tuple(_strings(value))
    return ()


def _strings(node: ast.AST | None) -> list[str]:
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    return [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]


def _checked(builders: list[ast.FunctionDef]) -> Iterator[str]:
    """Yield NAME for each `self.NAME = AnEnum(self.NAME)`, which raises an error for a value not in the enum."""
    for inner in (n for builder in builders for n in ast.walk(builder)):
        match inner:
            case ast.Assign(
                targets=[ast.Attribute(attr=target)],
                value=ast.Call(
                    func=ast.Name(), args=[ast.Attribute(value=ast.Name(id="self"), attr=name)], keywords=[]
                ),
            ) if target == name:
                yield name


_WORD = re.compile(r"`+(?:--)?(\w+)(?:=\w*)?`+|'(\w+)'")


def _deprecations(builders: list[ast.FunctionDef], parameters: set[str]) -> dict[str, str]:
    """Return the deprecated parameters and their new names, according to the warnings inside `if self.OLD ...:`."""
    found: dict[str, str] = {}
    for branch in (n for builder in builders for n in ast.walk(builder) if isinstance(n, ast.If)):
        if not any(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) for s in branch.body):
            continue
        if isinstance(branch.test, ast.Compare) and isinstance(branch.test.ops[0], ast.Eq | ast.In):
            continue  # only one value of the parameter is deprecated, not the parameter itself
        tested = {
            n.attr if isinstance(n, ast.Attribute) else n.id
            for n in ast.walk(branch.test)
            if isinstance(n, ast.Attribute | ast.Name)
        } & parameters
        for call in (s.value for s in branch.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)):
            texts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            message = " ".join(texts)
            if "warn" not in ast.unparse(call.func) or "deprecated" not in message or len(tested) != 1:
                continue
            old = next(iter(tested))
            words = [a or b for a, b in _WORD.findall(message)]
            new = next((w for w in words if w in parameters and w != old), "")
            if old in words and new:
                found[old] = new
    return found
