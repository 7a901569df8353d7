"""Find a script's subclasses of library classes, its rebound names, and the lines that depend on a version."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuwarden.static_analysis.signatures.tables import Definition, Parameter
from gpuwarden.static_analysis.static_eval import Program

# A branch whose condition uses one of these names depends on the installed release.
_VERSION_WORDS = ("__version__", "version", "hasattr", "signature", "_available", "find_spec", "getattr")
_EXPECTED = ("TypeError", "ImportError", "ModuleNotFoundError", "AttributeError")
_CATCHES_ALL = frozenset({"Exception", "BaseException"})
OWN = "<script>."
"""The prefix for the qualified names of the script's own classes."""


@dataclass(frozen=True)
class PackageUse:
    """The facts that `package_use` finds in a program.

    `own` contains the script's classes, as definitions like those in the tables. `rebound` contains imported names that
    the script also binds to other objects. `careful` contains the lines that run only with some releases or that have a
    fallback.
    """

    own: Mapping[str, Definition] = field(default_factory=dict)
    rebound: frozenset[str] = frozenset()
    careful: frozenset[int] = frozenset()


def package_use(program: Program) -> PackageUse:
    """Find a program's own classes, rebound names, and lines that depend on a release."""
    classes = [n for n, scope in program.nodes if isinstance(n, ast.ClassDef) and scope is None]
    local = frozenset(node.name for node in classes)
    return PackageUse(
        own={OWN + node.name: _class(program, node, local) for node in classes},
        rebound=frozenset(_rebound(program)),
        careful=frozenset(_careful(program)),
    )


def _class(program: Program, node: ast.ClassDef, local: frozenset[str]) -> Definition:
    """Return the definition of a class in the script.

    The definition is `open` if the class accepts, or may accept, any argument.
    """
    bases = tuple(OWN + b.id if isinstance(b, ast.Name) and b.id in local else program.dotted(b) for b in node.bases)
    decorators = [ast.unparse(d) for d in node.decorator_list]
    data = any("dataclass" in text for text in decorators)
    builds = any(isinstance(n, ast.FunctionDef) and n.name in {"__init__", "__new__"} for n in node.body)
    strange = bool(node.keywords) or any("dataclass" not in text or "init=False" in text for text in decorators)
    kind = "i" if builds else "d" if data else "p"
    return Definition(kind, bases, tuple(_fields(program, node)) if data else (), strange or builds)


def _fields(program: Program, node: ast.ClassDef) -> Iterator[Parameter]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            given: dict[str, ast.expr] = {}
            if isinstance(part.value, ast.Call) and ast.unparse(part.value.func).rpartition(".")[2] == "field":
                given = {k.arg: k.value for k in part.value.keywords if k.arg}
                required = not given.keys() & {"default", "default_factory"}
            else:
                required = part.value is None
            if ast.unparse(given.get("init", ast.Constant(True))) != "False":
                metadata = given.get("metadata")
                found = program.value(metadata) if isinstance(metadata, ast.Dict) else {}
                choices = found.get("choices") if isinstance(found, dict) else None
                texts = choices if isinstance(choices, list) and all(isinstance(c, str) for c in choices) else ()
                values = tuple(texts) or _literals(part.annotation)
                yield Parameter(part.target.id, None if required else "...", values, strict=bool(values))


def _literals(annotation: ast.expr) -> tuple[str, ...]:
    match annotation:
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=elts)):
            texts = tuple(e.value for e in elts if isinstance(e, ast.Constant) and isinstance(e.value, str))
            return texts if len(texts) == len(elts) else ()
    return ()


def _rebound(program: Program) -> Iterator[str]:
    """Yield names that are bound more than once, at least once by an import."""
    imported: Counter[str] = Counter()
    sources: dict[str, set[str]] = {}
    others: set[str] = set()
    for node, _ in program.nodes:
        match node:
            case ast.Import():
                pairs = [((a.asname or a.name.partition(".")[0]), (a.asname and a.name) or "") for a in node.names]
            case ast.ImportFrom():
                pairs = [(a.asname or a.name, f"{'.' * node.level}{node.module}.{a.name}") for a in node.names]
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                others.add(node.name)
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                others.add(name)
                continue
            case ast.Assign(targets=[ast.Attribute() as target]):
                # The script may patch a library: `transformers.Trainer.__init__ = mine`.
                others.add(program.dotted(target).rpartition(".")[0].rpartition(".")[2])
                continue
            case _:
                continue
        for name, source in pairs:
            imported[name] += 1
            sources.setdefault(name, set()).add(source)
    yield from (name for name in imported if name in others or len(sources[name]) > 1)


def _careful(program: Program) -> Iterator[int]:
    """Yield the lines in branches that depend on a version or in a `try` with a fallback."""
    for node, _ in program.nodes:
        if isinstance(node, ast.If | ast.IfExp):
            test = ast.unparse(node.test)
            if any(word in test for word in _VERSION_WORDS):
                yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.Try):
            first, last = min(s.lineno for s in node.body), max(s.end_lineno or s.lineno for s in node.body)
            tried = _called(node.body)
            for handler in node.handlers:
                caught = ast.unparse(handler.type) if handler.type else "Exception"
                again = tried & _called(handler.body)
                expected = any(word in caught for word in _EXPECTED)
                if expected or (again and any(word in caught for word in _CATCHES_ALL)):
                    yield from range(first, last + 1)


def _called(body: list[ast.stmt]) -> set[str]:
    calls = (n for statement in body for n in ast.walk(statement) if isinstance(n, ast.Call))
    return {ast.unparse(call.func).rpartition(".")[2] for call in calls}
