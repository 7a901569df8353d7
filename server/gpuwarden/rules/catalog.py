"""Finds the rules: one module each, named after the rule's id."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpuwarden import rules
from gpuwarden.core.registry import names
from gpuwarden.core.rules import Gate, Rule

_NOT_RULES = frozenset({"facts", "catalog", "page"})


@functools.cache
def all_rules() -> tuple[Rule[Any], ...]:
    """Every rule, sorted by id. Raises ValueError for a module that is not named after the one rule it holds."""
    found = [_rule_of(name) for name in names(rules, hidden=_NOT_RULES)]
    return tuple(sorted(found, key=lambda r: r.id))


def rules_of(gate: Gate) -> tuple[Rule[Any], ...]:
    """The rules of one gate."""
    return tuple(r for r in all_rules() if r.gate == gate)


def _rule_of(name: str) -> Rule[Any]:
    module = importlib.import_module(f"{rules.__name__}.{name}")
    held = [value for value in vars(module).values() if isinstance(value, Rule)]
    stem = held[0].id.lower().replace("-", "_") if len(held) == 1 else ""
    if not stem or not name.startswith(stem + "_"):
        raise ValueError(f"rules/{name}.py must hold exactly one rule, whose id its name starts with")
    return held[0]
