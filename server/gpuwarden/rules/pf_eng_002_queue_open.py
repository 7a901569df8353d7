from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import line
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-002",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(Action.SET_ARGUMENT, "to select a queue that is open to you", name="options"),
)
def queue_open(facts: SubmitFacts) -> Iterator[Found]:
    """The engine has the job's queue, and the queue is open to this account.

    Why: a job submitted to a queue that does not exist is rejected. If the queue is down, the job waits until it
    reopens. If the queue does not admit the job's account or QOS, the job waits forever.

    Example:
        submit_job(platform="slurm/cluster", options={"partition": "gpus"}, script=train)  # it is called gpu

    Instead:
        submit_job(platform="slurm/cluster", options={"partition": "gpu"}, script=train)

    """
    limits = facts.limits
    if limits is None:
        return
    queue, request = limits.queue, limits.request
    if queue is None:
        there = line(", ".join(q.name for q in limits.queues), 300) or "none"
        what = f"no queue {request.queue}" if request.queue else "no default queue, and the job does not specify one"
        yield Found(f"{facts.spec.platform} has {what}; its queues are {there}")
        return
    if queue.open is False:
        yield Found(f"the queue {queue.name} is {queue.state.lower() or 'closed'}; it does not currently start jobs")
    if request.account and queue.accounts is not None and request.account not in queue.accounts:
        yield Found(f"the queue {queue.name} does not admit the account {request.account}")
    if request.qos and queue.qos is not None and request.qos not in queue.qos:
        yield Found(f"the queue {queue.name} does not admit the QOS {request.qos}")
