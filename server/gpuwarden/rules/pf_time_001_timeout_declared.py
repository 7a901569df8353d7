from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-TIME-001",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(Action.SET_ARGUMENT, "to the estimate plus at least 30 %", name="timeout_s"),
)
def timeout_declared(facts: SubmitFacts) -> Iterator[Found]:
    """The job has a timeout.

    Why: a platform's default timeout (often 30 minutes) ends long jobs too early, and a job without any limit is billed
    until you notice it.

    Example:
        submit_job(script=train)

    Instead:
        submit_job(script=train, timeout_s=4_700)

    """
    if facts.spec.timeout_s is not None:
        return
    default = facts.profile.limits.default_timeout_s if facts.profile else None
    if default is not None:
        yield Found(f"no timeout is set; the platform would end the job after {default} s")
    elif facts.metered:
        yield Found("no timeout is set; a job that hangs would never end, and would still be billed")
    else:
        yield Found("no timeout is set; a job that hangs would never end", severity=Severity.WARNING)
