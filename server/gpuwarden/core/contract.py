"""Check a plug-in's module against its contract. Standard library only, because this module is copied to machines.

A contract lists required values with their checks, functions with their parameters, and the protocol of the class that
`create` returns. The checks only read signatures and declarations; they never call the plug-in.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Value:
    """An attribute that a module must have: its check, and a short description of a valid value."""

    check: Callable[[Any], bool]
    wants: str


TEXT = Value(lambda v: isinstance(v, str) and bool(v), "a non-empty string")
TEXTS = Value(lambda v: isinstance(v, tuple) and all(isinstance(t, str) and t for t in v), "a tuple of strings")


def one_of(*choices: str) -> Value:
    """Require an attribute to be one of the given strings."""
    return Value(lambda v: isinstance(v, str) and v in choices, "one of " + ", ".join(repr(c) for c in choices))


def instance_of(kind: type) -> Value:
    """Require an attribute to be an instance of a class."""
    return Value(lambda v: isinstance(v, kind), "a " + kind.__name__)


@dataclass(frozen=True)
class Contract:
    """The contract for one kind of plug-in. `home` is the module whose docstring describes the contract."""

    home: str
    values: Mapping[str, Value] = field(default_factory=dict)
    functions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The functions that the module must define, each with the parameters that callers pass. They can't be async."""
    product: type | None = None
    """The protocol of the object that `create` returns. If it is set, `functions` must contain `create`."""
    rest: Callable[[ModuleType, str], Iterator[str]] = lambda module, name: iter(())
    """A function that yields errors specific to this kind of plug-in. It takes the module and the plug-in's name."""

    def faults(self, module: ModuleType, name: str) -> list[str]:
        """Return one sentence for each way in which a module violates the contract."""
        found = []
        for key, value in self.values.items():
            if not hasattr(module, key):
                found.append(f"{key} is missing; it must be {value.wants}")
            elif not value.check(getattr(module, key)):
                found.append(f"{key} is {_shown(getattr(module, key))}; it must be {value.wants}")
        found += [f for key, wanted in self.functions.items() for f in _function_faults(module, key, wanted)]
        if not found and self.product is not None:
            try:
                made = typing.get_type_hints(module.create).get("return")
            except (NameError, TypeError, AttributeError) as error:
                return [f"the annotations of create can't be evaluated: {error}"]
            if not isinstance(made, type):
                return [f"the return annotation of create must be a class, not {_shown(made)}"]
            found = class_faults(made, self.product)
        return found or list(self.rest(module, name))


def _function_faults(module: ModuleType, key: str, wanted: tuple[str, ...]) -> Iterator[str]:
    call = f"{key}({', '.join(wanted)})"
    function = getattr(module, key, None)
    if function is None:
        yield f"{call} is missing"
    elif not callable(function):
        yield f"{key} is {_shown(function)}; it must be the function {call}"
    elif _awaited(function):
        yield f"{key} is async; it must be the plain function {call}"
    else:
        try:
            _signature(function).bind(*wanted)
        except TypeError:
            yield f"{key}{_signature(function)} can't be called as {call}"


def _signature(function: Any) -> inspect.Signature:
    """Return a function's signature, or an empty signature for a C function whose signature can't be read."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def class_faults(made: type, protocol: type) -> list[str]:
    """Return the errors in a class: missing methods, and methods whose parameters or `async` keyword differ."""
    faults = []
    methods = inspect.getmembers(protocol, inspect.isfunction)
    for name, wanted in ((n, m) for n, m in methods if not n.startswith("_")):
        shown = f"{made.__name__}.{name}"
        method = getattr(made, name, None)
        if method is None or method is wanted:
            faults.append(f"{shown} is missing")
            continue
        if not callable(method):
            faults.append(f"{shown} is {_shown(method)}; it must be a method")
            continue
        if _awaited(method) != _awaited(wanted):
            faults.append(f"{shown} must be {'an async' if _awaited(wanted) else 'a plain'} method")
        theirs, ours = _signature(method), _signature(wanted)
        if not _replaces(theirs, ours):
            faults.append(f"{shown}{theirs} can't be called as {name}{ours}")
    return faults


def _awaited(function: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def _replaces(theirs: inspect.Signature, ours: inspect.Signature) -> bool:
    """Return true if `theirs` accepts every call that `ours` accepts, by position and by name."""
    every_name = any(p.kind is p.VAR_KEYWORD for p in theirs.parameters.values())
    named = [n for n, p in ours.parameters.items() if n != "self" and p.kind is not p.VAR_KEYWORD]
    positional = [n for n, p in ours.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [n for n, p in ours.parameters.items() if p.default is p.empty and n in named]
    if not every_name and any(n not in theirs.parameters for n in named):
        return False
    try:
        theirs.bind(*positional, **{n: n for n in named if n not in positional})
        theirs.bind("self", **{n: n for n in required})
    except TypeError:
        return False
    return True


def object_faults(made: object, protocol: type, name: str) -> list[str]:
    """Return one sentence for each attribute that violates a protocol, or for a `name` that is not the plug-in's."""
    found = []
    for key, kind in typing.get_type_hints(protocol).items():
        value = getattr(made, key, None)
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (kind is float and isinstance(value, bool)):
            found.append(f"{type(made).__name__}.{key} is {_shown(value)}; it must be a {kind.__name__}")
    if not found and getattr(made, "name", name) != name:
        found.append(f"{type(made).__name__}.name is {_shown(getattr(made, 'name', None))}; it must be {name!r}")
    return found


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
