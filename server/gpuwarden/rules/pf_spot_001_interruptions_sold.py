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

    Why: the request would be refused, or quietly be filled at the full price. Where a platform sells interruptible
    machines, it may take them back at any moment; where it does not, `interruptible` would promise a discount and a
    risk that both don't exist, and the cost that was shown for approval would be wrong.

    Example:
        submit_job(platform="lambda", interruptible=True, script=train)

    Instead:
        submit_job(platform="vastai", interruptible=True, script=train)
        submit_job(platform="lambda", script=train)  # at the full price, without interruptions

    """
    if facts.spec.interruptible and facts.profile is not None and not facts.profile.spot.offered:
        yield Found(f"{facts.spec.platform} sells no interruptible machines")
