"""Find the rules: one module each, named after the rule's id."""

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
    """Return every rule, sorted by id. Raises ValueError for a module that is not named after its only rule."""
    found = []
    for name in names(rules, hidden=_NOT_RULES):
        module = importlib.import_module(f"{rules.__name__}.{name}")
        here = [value for value in vars(module).values() if isinstance(value, Rule)]
        if len(here) != 1 or not name.startswith(here[0].id.lower().replace("-", "_") + "_"):
            raise ValueError(f"rules/{name}.py must define exactly one rule, whose id its name starts with")
        found += here
    return tuple(sorted(found, key=lambda r: r.id))


def rules_of(gate: Gate) -> tuple[Rule[Any], ...]:
    """Return the rules of one gate, sorted by id."""
    return tuple(r for r in all_rules() if r.gate == gate)
