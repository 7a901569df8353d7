from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-007",
    gate="submit",
    severity=Severity.INFO,
    fix="Save checkpoints often enough, and load the last one at the start.",
)
def interruptions_expected(facts: SubmitFacts) -> Iterator[Found]:
    """The user is informed if the queue may interrupt jobs in favor of others, and how long interrupted jobs wait.

    Why: a job without checkpoints starts over after each interruption. A job that may not be restarted is lost at the
    first interruption.

    Example:
        submit_job(platform="slurm/cluster", options={"partition": "scavenge"}, max_restarts=0, script=train)

    Instead:
        submit_job(platform="slurm/cluster", options={"partition": "gpu"}, max_restarts=0, script=train)

    """
    queue = facts.limits.queue if facts.limits is not None else None
    if queue is None or facts.limits is None or queue.preempts is None or queue.preempts == "no":
        return
    what = {"requeue": "queued again", "suspend": "suspended"}.get(queue.preempts, "ended")
    grace = f" after a grace period of {queue.grace_s} s" if queue.grace_s else ""
    wait = facts.limits.requeue_s
    later = f"; it can start again {wait:.0f} s later at the earliest" if wait and queue.preempts != "suspend" else ""
    lost = not facts.spec.max_restarts and queue.preempts != "suspend"
    yield Found(
        f"a job in the queue {queue.name} may be {what} to make room for another job{grace}{later}"
        + (", and this job may not be restarted" if lost else ""),
        severity=Severity.WARNING if lost else None,
    )
