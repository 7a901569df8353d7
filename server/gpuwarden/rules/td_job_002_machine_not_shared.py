from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-JOB-002",
    gate="teardown",
    severity=Severity.ERROR,
    fix="Finish those jobs first.",
)
def machine_not_shared(facts: TeardownFacts) -> Iterator[Found]:
    """No other job uses the machine.

    Why: several jobs may run on one instance, and stopping or terminating it ends them all. The proof for one job's
    outputs does not cover another job's files, so all jobs must end and all outputs must be pulled first.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # j2 runs on the same instance

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # j2 has ended, too

    """
    for job in facts.other_jobs:
        yield Found(f"job {job} uses the same instance")
