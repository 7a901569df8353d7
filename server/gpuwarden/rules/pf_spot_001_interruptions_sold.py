from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SPOT-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Set interruptible to false, or choose a platform that sells interruptible machines.",
)
def interruptions_sold(facts: SubmitFacts) -> Iterator[Found]:
    """An interruptible machine is asked for only where it is sold.

    Why: the request would be refused, or quietly be filled at the full price.
    """
    if facts.spec.interruptible and facts.profile is not None and not facts.profile.spot.offered:
        yield Found(f"{facts.spec.platform} sells no interruptible machines")
