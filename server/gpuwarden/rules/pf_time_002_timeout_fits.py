from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import MARGIN, SubmitFacts


@rule(
    "PF-TIME-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Raise timeout_s, or shorten the job.",
)
def timeout_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The timeout is at least 30 % above the estimate.

    Why: set-up, downloads and saving take time that estimates forget; a job that ends before its last save lost it.

    Example:
        submit_job(script=train, estimate_s=3_600, timeout_s=3_600)

    Instead:
        submit_job(script=train, estimate_s=3_600, timeout_s=4_680)

    """
    spec = facts.spec
    if spec.timeout_s is None or spec.estimate_s is None:
        return
    needed = round(spec.estimate_s * MARGIN)
    if spec.timeout_s < needed:
        yield Found(
            f"timeout_s is {spec.timeout_s}, the estimate is {spec.estimate_s}; with 30 % of room it needs {needed}",
            fix=f"Set timeout_s to {needed} or more.",
        )
