from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-PLACE-001", gate="submit", severity=Severity.ERROR, fix="Mend the place, or choose another platform.")
def place_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The place where the job would run can be used.

    Why: a folder that can't be written or a program that is missing ends a job before it begins. Only a place that
    is there already can be looked at, not one that is still to be rented.
    """
    yield from facts.told("PF-PLACE-001")
