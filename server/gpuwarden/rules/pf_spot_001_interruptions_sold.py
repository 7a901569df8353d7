from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SPOT-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Set interruptible to false, or choose a platform that offers interruptible machines.",
)
def interruptions_sold(facts: SubmitFacts) -> Iterator[Found]:
    """If the job requests an interruptible machine, the platform offers such machines.

    Why: otherwise the platform rejects the request, or silently fulfills it at full price. A platform may reclaim an
    interruptible machine at any time. If it offers no interruptible machines, neither the discount nor the risk exists,
    and the cost shown for approval would be wrong.

    Example:
        submit_job(platform="lambda", interruptible=True, script=train)

    Instead:
        submit_job(platform="vastai", interruptible=True, script=train)
        submit_job(platform="lambda", script=train)  # at the full price, without interruptions

    """
    if facts.spec.interruptible and facts.profile is not None and not facts.profile.spot.offered:
        yield Found(f"{facts.spec.platform} offers no interruptible machines")
