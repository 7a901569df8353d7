from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use the replacement.",
)
def names_exist(facts: SubmitFacts) -> Iterator[Found]:
    """Names that the script imports exist in the releases that the header requires.

    Why: the import fails in the job's first second, after the machine has been rented. The names are read from the
    released wheels; a module that creates names at run time is not checked. Without a header, the release is unknown,
    and a name that only some releases have is reported as a warning.

    Example:
        # dependencies = ["trl>=1.16"]
        from trl import PPOTrainer

    Instead:
        # dependencies = ["trl>=1.16"]
        from trl import GRPOTrainer

    """
    for misfit in facts.libraries.imports(facts.uses.imports, facts.uses.calls):
        yield Found(misfit.message, fix=misfit.fix, severity=None if misfit.sure else Severity.WARNING)
