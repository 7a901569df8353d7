"""Load the rules. Each rule has its own module, named after the rule's id."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from gpuwarden import rules
from gpuwarden.core.contract import Contract
from gpuwarden.core.registry import Registry
from gpuwarden.core.rules import Gate, Rule


def _faults(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the problems with a rule's module: no rule or several rules, a wrong name, or a duplicate id."""
    held = _held(module)
    if len(held) != 1:
        yield f"it must contain exactly one rule, not {len(held)}"
    elif not f"{name}_".startswith(_stem(held[0]) + "_"):
        yield f"its name must start with {_stem(held[0])}, the id of its rule"
    elif others := [n for n in RULES.built_in() if n != name and n.startswith(_stem(held[0]) + "_")]:
        yield f"{held[0].id} is also the id of the built-in rule in {others[0]}.py"


RULES: Final = Registry(
    "rule",
    rules,
    Contract(home="gpuwarden.core.rules", rest=_faults),
    hidden=frozenset({"facts", "catalog", "page"}),
)


def all_rules() -> tuple[Rule[Any], ...]:
    """Return every rule, sorted by id, including those from installed packages."""
    return tuple(sorted((_held(module)[0] for _, module in RULES.usable()), key=lambda r: r.id))


def built_in_rules() -> tuple[Rule[Any], ...]:
    """Return the built-in rules, sorted by id."""
    return tuple(_held(RULES.load(name))[0] for name in RULES.built_in())


def rules_of(gate: Gate) -> tuple[Rule[Any], ...]:
    """Return one gate's rules, sorted by id."""
    return tuple(r for r in all_rules() if r.gate == gate)


def unusable_rules() -> tuple[str, ...]:
    """Return a sentence for each rule from an installed package that can't be loaded."""
    return tuple(s.fault for s in RULES.broken())


@cache
def _held(module: ModuleType) -> tuple[Rule[Any], ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Rule))


def _stem(rule: Rule[Any]) -> str:
    return rule.id.lower().replace("-", "_")
