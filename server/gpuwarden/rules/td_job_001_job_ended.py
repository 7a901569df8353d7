from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.states import AT_REST
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-JOB-001",
    gate="teardown",
    severity=Severity.ERROR,
    fix=(do(Action.CHECK, "until the job has ended"), do(Action.CANCEL, "to end it", alternative=True)),
)
def job_ended(facts: TeardownFacts) -> Iterator[Found]:
    """The job has ended, or is paused.

    Why: a running job may still be writing, and a preempted job may still need its files. A paused job has no process;
    it resumes on its machine after a stop, and from a copy after a termination. A job in an unknown state counts as
    running, because a machine that does not answer does not prove that the job has ended.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # the job is running
        teardown_request(job_id="j2", verb="stop")  # the machine of j2 does not answer

    Instead:
        check_job(job_id="j1")  # until it has succeeded or failed
        teardown_request(job_id="j1", verb="terminate")
        cancel_job(job_id="j2")
        check_job(job_id="j2")  # canceled
        teardown_request(job_id="j2", verb="stop")

    """
    if facts.job_state not in AT_REST and not facts.gone:
        yield Found(f"job {facts.job_id} {facts.job_state.phrase}")
