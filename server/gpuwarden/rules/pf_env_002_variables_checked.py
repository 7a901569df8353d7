from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import GIVEN_VARIABLES


@rule(
    "PF-ENV-002",
    gate="submit",
    severity=Severity.INFO,
    fix="Stop early with a clear message if the variable is empty.",
)
def variables_checked(facts: SubmitFacts) -> Iterator[Found]:
    """Variables that may be missing are checked before they are used.

    Why: `os.environ.get("MODEL")` returns None if MODEL is not set. The script then fails much later and far from the
    cause, for example because of the repo id "None" or a learning rate that can't be multiplied. A check in the
    script's first lines names the missing variable before anything is downloaded.

    Example:
        model = os.environ.get("MODEL")

    Instead:
        model = os.environ.get("MODEL") or sys.exit("MODEL is not set")

    """
    given = {*facts.spec.env, *facts.spec.secrets, *GIVEN_VARIABLES}
    for read in facts.uses.env:
        if not read.required and not read.checked and read.name not in given:
            yield Found(f"line {read.line} reads {read.name}, which is neither passed nor checked")
