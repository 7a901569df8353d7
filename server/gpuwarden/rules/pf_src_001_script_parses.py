from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-SRC-001", gate="submit", severity=Severity.ERROR, fix="Mend the script.")
def script_parses(facts: SubmitFacts) -> Iterator[Found]:
    """The script is valid Python with a valid header.

    Why: a typing error costs nothing here and a rental there.
    """
    if facts.script is not None and facts.script.error:
        yield Found(facts.script.error)
