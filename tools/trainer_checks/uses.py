"""Read how a trainer uses its libraries: imports, arguments, methods and callback events."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Packages whose signatures the trainers depend on. The other packages are only imported.
READ = ("transformers", "trl", "peft", "datasets", "accelerate", "huggingface-hub", "sentence-transformers",
        "safetensors", "albumentations", "torchmetrics")  # fmt: skip
MODULES = {name.replace("-", "_"): name for name in READ}


@dataclass(frozen=True, order=True)
class Use:
    """One use of a library by a trainer: a name, or one argument or method of that name."""

    module: str
    name: str
    method: str = ""
    keyword: str = ""

    def __str__(self) -> str:
        """Return the use as it is written in a script."""
        whole = f"{self.module}.{self.name}{f'.{self.method}' if self.method else ''}"
        return f"{whole}({self.keyword}=)" if self.keyword else whole


def uses_of(tree: ast.Module) -> set[Use]:
    """Return one script's uses of the libraries."""
    imported: dict[str, Use] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            imported |= {a.asname or a.name: Use(str(node.module), a.name) for a in node.names}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = set(imported.values())
    for function in functions.values():
        found |= set(_called(function, imported, functions))
    return found | set(_of_the_trainer(tree))


def _called(
    function: ast.FunctionDef, imported: Mapping[str, Use], functions: Mapping[str, ast.FunctionDef]
) -> Iterator[Use]:
    """Yield the arguments and methods of imported classes and functions that a function uses."""
    made = {
        target.id: imported[node.value.func.id]
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Name) and node.value.func.id in imported
    }
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Name(id=name) if name in imported:
                use, method = imported[name], ""
            case ast.Attribute(value=ast.Name(id=name), attr=method) if name in imported or name in made:
                use = imported.get(name) or made[name]
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=method) if name in imported:
                use = imported[name]
            case _:
                continue
        yield Use(use.module, use.name, method)
        yield from (Use(use.module, use.name, method, key) for key in _keywords(call, function, functions))


def _keywords(call: ast.Call, around: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """Yield a call's keywords, including the keys of a mapping that a function in the script returns or fills."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
            continue
        match keyword.value:
            case ast.Call(func=ast.Name(id=name)) if name in functions:
                yield from _keys(functions[name], None)
            case ast.Name(id=name):
                yield from _keys(around, name)


def _keys(function: ast.FunctionDef, name: str | None) -> Iterator[str]:
    """Yield the keys of the mappings that a function assigns to a name, or to the name that it returns."""
    returned = {n.value.id for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)}
    names = {name} if name else returned
    for node in ast.walk(function):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=value)
                | ast.AugAssign(target=ast.Name(id=target), value=value)
            ) if target in names:
                yield from _literal_keys(value)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=str(key)))]) if (
                target in names
            ):
                yield key
            case ast.Return(value=ast.Dict() as value) if name is None:
                yield from _literal_keys(value)


def _literal_keys(value: ast.expr | None) -> Iterator[str]:
    for node in ast.walk(value) if value else ():
        if isinstance(node, ast.Dict):
            yield from (k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
            return


def _of_the_trainer(tree: ast.Module) -> Iterator[Use]:
    """Yield the methods of the Trainer that a script calls or replaces, and the events that its callbacks handle."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="trainer"), attr=name):
                yield Use("transformers", "Trainer", name)
            case ast.FunctionDef(name=name) if name.startswith("on_") and len(node.args.args) > 3:
                yield Use("transformers", "TrainerCallback", name)
