from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import line
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-005",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(Action.SET_ARGUMENT, "to request resources that the queue has, or choose another queue", name="options"),
)
def resources_there(facts: SubmitFacts) -> Iterator[Found]:
    """The queue's machines have the requested resources.

    Why: if a job requests more than any machine in its queue has, the engine rejects the job or leaves it waiting
    forever. A waiting job shows the same reason as when the machines are busy.

    Example:
        submit_job(platform="slurm/cluster", gpu="h100", gpu_count=8, script=train)  # its machines have four

    Instead:
        submit_job(platform="slurm/cluster", gpu="h100", gpu_count=4, options={"nodes": 2}, script=train)

    """
    if facts.limits is None or facts.limits.queue is None:
        return
    queue, request = facts.limits.queue, facts.limits.request
    if request.gpus and queue.gpus is not None:
        there = queue.gpus
        # Types are compared without regard to case, because sites spell them differently.
        most = max(there.values(), default=0) if not request.gpu else there.get(request.gpu.lower(), 0)
        has = line(", ".join(f"{count} x {kind or 'GPU'}" for kind, count in sorted(there.items())), 200) or "none"
        if request.gpus > most:
            wanted = f"{request.gpus} x {request.gpu or 'GPU'}"
            yield Found(f"a machine in the queue {queue.name} has {has}, but the job requests {wanted}")
    for what, size, limit in (
        ("processors", request.cpus, queue.cpus),
        ("MB of memory", request.memory_mb, queue.memory_mb),
    ):
        if size is not None and limit is not None and size > limit:
            yield Found(f"a machine in the queue {queue.name} has {limit} {what}, but the job requests {size}")
    fewest = min((n for n in (queue.nodes, queue.max_nodes) if n is not None), default=None)
    if fewest is not None and request.nodes > fewest:
        yield Found(
            f"a job in the queue {queue.name} gets at most {fewest} machines, but this one requests {request.nodes}"
        )
