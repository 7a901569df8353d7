from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import MARGIN, SubmitFacts


@rule(
    "PF-TIME-002",
    gate="submit",
    severity=Severity.ERROR,
    fix=(do(Action.SET_ARGUMENT, "higher", name="timeout_s"), "Or shorten the job."),
)
def timeout_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The timeout is at least 30 % above the estimate.

    Why: estimates often omit the time for setup, downloads and saving; a job that is stopped before its last save loses
    that save.

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
            f"the timeout is {spec.timeout_s} s, but the estimate is {spec.estimate_s} s, "
            f"or {needed} s with a margin of 30 %",
            fix=do(Action.SET_ARGUMENT, name="timeout_s", at_least=needed),
        )
