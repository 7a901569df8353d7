from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-PLUG-001",
    gate="teardown",
    severity=Severity.UNKNOWN,
    fix=("Fix or uninstall the rule's package.", do(Action.DOCTOR, "to see which package that is")),
)
def rules_loaded(facts: TeardownFacts) -> Iterator[Found]:
    """Every rule from an installed package can be loaded.

    Why: if a rule is skipped silently, machines that the rule was installed to protect would be terminated.

    Example:
        # An installed package contains a rule that imports a module that this version of gpuwarden lacks.
        teardown_request(job_id="j1", verb="terminate")

    Instead:

        # The package was updated, and `gpuwarden doctor` no longer reports it.
        teardown_request(job_id="j1", verb="terminate")

    """
    yield from (Found(fault) for fault in facts.unusable_rules)
