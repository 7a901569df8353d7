from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLUG-001",
    gate="submit",
    severity=Severity.UNKNOWN,
    fix=("Fix or uninstall the rule's package.", do(Action.DOCTOR, "to see which package that is")),
)
def rules_loaded(facts: SubmitFacts) -> Iterator[Found]:
    """Every rule from an installed package can be loaded.

    Why: if a rule is skipped silently, jobs that the rule was installed to stop would pass.

    Example:
        # An installed package contains a rule that imports a module that this version of gpuwarden lacks.
        submit_job(platform="local", script=train)

    Instead:

        # The package was updated, and `gpuwarden doctor` no longer reports it.
        submit_job(platform="local", script=train)

    """
    yield from (Found(fault) for fault in facts.unusable_rules)
