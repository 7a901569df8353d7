"""Decide whether imported code that was not analyzed can save a trained model.

Imported code can save a model only if it has access to one: as a function that receives the model or its trainer as an
argument, as a trainer callback, or as a base class of the script's classes. A function that creates a dataset or
computes rewards has no access. A function that does the complete job is recognized by its name: `run(config)`,
`save_all()`. Names are followed through assignments, loops, returns and the parameters of the script's own functions,
regardless of scope.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Final

from gpuwarden.static_analysis.signatures.tables import package_of
from gpuwarden.static_analysis.static_eval import Call, Program

_ACTS: Final = frozenset(
    """train fit finetune run main launch start execute do merge convert write dump store finish finalize end complete
    teardown""".split()  # noqa: SIM905
)
"""First words in the names of functions that may run a complete job."""
_KEEPS: Final = frozenset(
    """save saves saver saving ckpt checkpoint checkpoints checkpointer checkpointing export exporter push upload
    uploader publish trainer runner writer manager""".split()  # noqa: SIM905
)
_LISTENS: Final = frozenset({"callback", "callbacks", "hook", "hooks"})
"""Words in method names such as `add_callback` and `register_forward_hook`."""
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_MODEL: Final = re.compile(
    r"(.*_)?(model|net|network|unet|transformer|policy|trainer|accelerator|engine|fabric|pipeline|pipe|agent|learner)\d*"
)
_SHOWS_A_MODEL: Final = frozenset({"state_dict", "parameters", "named_parameters", "save_pretrained", "backward"})
_PREPARES: Final = frozenset({"tokenizer", "processor", "extractor", "config"})
_ROUNDS: Final = 12
_EVERYTHING: Final = frozenset({"locals", "globals", "vars"})
_RECEIVES: Final = frozenset(
    """callbacks callback hooks hook logger loggers plugins strategy rollout_func optimizers optimizer_cls_and_kwargs
    model_init preprocess_logits_for_metrics""".split()  # noqa: SIM905
)
"""Parameters whose objects receive the model, the trainer or a training step from a library."""


def can_save(program: Program, nodes: Iterable[ast.Import | ast.ImportFrom], trainers: Iterable[Call]) -> bool:
    """Return true if imported functions may receive a model, or if their names suggest that they do a complete job.

    If the script itself does not train, the imported code may train, so the result is true.
    """
    bound = {a.asname or a.name.partition(".")[0] for node in nodes for a in node.names if not a.name.isupper()}
    seen = {c.name for c in trainers if package_of(c.name)} or any(c.last == "backward" for c in program.calls)
    if "*" in bound or not seen:
        return True
    unread = _Unread(program, bound, trainers)
    return not unread.settled or any(map(unread.gets_a_model, unread.nodes))


class _Unread:
    """The names in a program that refer to unread code or its results, and those that refer to a model."""

    def __init__(self, program: Program, bound: set[str], trainers: Iterable[Call]) -> None:
        self.nodes = [node for node, _ in program.nodes]
        self.bound, self.unread = bound, set(bound)
        self.functions = {n.name: n for n in self.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        for made in (n for n in self.nodes if isinstance(n, ast.ClassDef)):
            for part in made.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    self.functions[made.name] = part
        self.makers = {c.node.func for c in trainers if c.node is not None}
        self.models = {
            n.value.id
            for n in self.nodes
            if isinstance(n, ast.Attribute) and n.attr in _SHOWS_A_MODEL and isinstance(n.value, ast.Name)
            if not _words(n.value.id) & _PREPARES
        }
        self.settled = False
        for _ in range(_ROUNDS):
            size = len(self.unread), len(self.models)
            for node in self.nodes:
                self.follow(node)
            if size == (len(self.unread), len(self.models)):
                self.settled = True
                break

    def follow(self, node: ast.AST) -> None:
        """Record which of the names that a node binds refer to unread code or to a model."""
        match node:
            case ast.Assign(value=value):
                self.bind(node.targets, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self.bind([target], value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self.bind([target], value)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                self.bind([target], value)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                returned = (n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None)
                if any(self.foreign(value) for value in returned):
                    self.unread.add(name)
            case ast.Call(func=func) if _name(func) in self.functions:
                parameters = self.functions[_name(func)].args
                names = [a.arg for a in (*parameters.posonlyargs, *parameters.args) if a.arg != "self"]
                given = [*zip(names, node.args, strict=False), *((k.arg or "", k.value) for k in node.keywords)]
                self.unread |= {name for name, value in given if name and self.foreign(value)}

    def bind(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        """Record the names that are assigned unread code or a model."""
        names = {_name(part) for target in targets for part in ast.walk(target)} - {"", "self"}
        if self.foreign(value):
            self.unread |= names
        if (isinstance(value, ast.Call) and value.func in self.makers) or self.mentions_a_model(value):
            self.models |= {name for name in names if not _words(name) & _PREPARES}

    def foreign(self, node: ast.expr) -> bool:
        """Return true if an expression is unread code or its result."""
        parts: list[ast.expr | None] = [node]
        while parts:
            match parts.pop():
                case (ast.Name() | ast.Attribute()) as named if _name(named) in self.unread:
                    return True
                case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial"), args=[function, *_]):
                    parts.append(function)
                case (
                    ast.Attribute(value=part)
                    | ast.Subscript(value=part)
                    | ast.Starred(value=part)
                    | ast.Await(value=part)
                    | ast.NamedExpr(value=part)
                    | ast.Call(func=part)
                    | ast.ListComp(elt=part)
                    | ast.GeneratorExp(elt=part)
                    | ast.Lambda(body=part)
                ):
                    parts.append(part)
                case ast.List(elts=some) | ast.Tuple(elts=some) | ast.Set(elts=some) | ast.BoolOp(values=some):
                    parts += some
                case ast.Dict(values=some):
                    parts += some
                case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, right=other):
                    parts += [one, other]
        return False

    def mentions_a_model(self, node: ast.AST) -> bool:
        """Return true if a part of an expression is a model, its trainer, or the object that contains them."""
        for part in ast.walk(node):
            match part:
                case ast.Name(id="self") if part is node:
                    return True
                case ast.Name() | ast.Attribute():
                    name = _name(part)
                    if name in self.models or _MODEL.fullmatch(name.lower()):
                        return True
                case ast.Call(func=ast.Name(id=name)) if name in _EVERYTHING:
                    return True
        return False

    def gets_a_model(self, node: ast.AST) -> bool:
        """Return true if a statement or a call gives unread code access to a model."""
        match node:
            case ast.ClassDef(bases=bases, decorator_list=decorators):
                return any(map(self.foreign, (*bases, *decorators)))
            case ast.FunctionDef(decorator_list=decorators) | ast.AsyncFunctionDef(decorator_list=decorators):
                return any(map(self.foreign, decorators))
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"))]):
                return False
            case ast.Assign(targets=[ast.Attribute(value=owner)], value=value) if self.foreign(owner):
                return self.mentions_a_model(value) and not self.mentions_a_model(owner)
            case ast.Assign(targets=[ast.Attribute() as target], value=value) if self.foreign(value):
                return isinstance(value, ast.Name | ast.Attribute) or self.mentions_a_model(target)
            case ast.Call():
                return self.call_gets_a_model(node)
        return False

    def call_gets_a_model(self, call: ast.Call) -> bool:
        """Return true if a call passes a model to unread code, or passes unread code to an object that has a model."""
        given = [(None, n) for n in call.args] + [(k.arg, k.value) for k in call.keywords]
        name = _name(call.func)
        if self.foreign(call.func):
            if isinstance(call.func, ast.Name) and name in self.functions:
                return False  # the body of the script's own function is analyzed
            if isinstance(call.func, ast.Attribute) and self.mentions_a_model(call.func.value):
                return bool((_KEEPS | _LISTENS) & _words(name))  # a model's `train()` and `to(device)` don't save it
            return _acts(name) or any(self.mentions_a_model(value) for _, value in given)
        handed = [(parameter, value) for parameter, value in given if self.foreign(value)]
        if any(p in _RECEIVES or (_name(v) in self.bound and _acts(_name(v))) for p, v in handed):
            return True
        if name == "partial" and self.foreign(call) and any(self.mentions_a_model(value) for _, value in given):
            return True
        if name == "fit" and call.args and self.foreign(call.args[0]):
            return True
        return bool(handed) and bool(_LISTENS & _words(name))


def unread_modules(program: Program, known: frozenset[str]) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    """Yield imports of modules that were not analyzed and are not in `known`, each with a description of the module."""
    for node, _ in program.nodes:
        match node:
            case ast.ImportFrom(level=level) if level:
                yield "a module next to the script", node
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] not in known:
                yield f"the module {module}", node
            case ast.Import():
                for alias in (a for a in node.names if a.name.partition(".")[0] not in known):
                    yield f"the module {alias.name}", ast.copy_location(ast.Import(names=[alias]), node)


def _acts(name: str) -> bool:
    """Return true if a function's name suggests that it does a complete job, or that it saves."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and (words[0] in _ACTS or bool((_KEEPS | _LISTENS) & set(words)))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(name)}


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name, or an empty string for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
