from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-PLACE-002", gate="submit", severity=Severity.WARNING, fix="Free some space first.")
def place_has_room(facts: SubmitFacts) -> Iterator[Found]:
    """The place has room on its disk.

    Why: a checkpoint that meets a full disk is torn, and the job that saved it often runs on.
    """
    yield from facts.told("PF-PLACE-002")
