from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-PLUG-001",
    gate="teardown",
    severity=Severity.UNKNOWN,
    fix="Fix or uninstall the package that brings the rule; gpuwarden doctor names it.",
)
def rules_loaded(facts: TeardownFacts) -> Iterator[Found]:
    """Every rule that an installed package brings can be loaded.

    Why: a rule that is left out in silence lets a machine end that it was installed to keep.
    """
    yield from (Found(fault) for fault in facts.unusable_rules)
