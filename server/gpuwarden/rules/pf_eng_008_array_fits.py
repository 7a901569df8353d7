from collections.abc import Iterator

from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-008",
    gate="submit",
    severity=Severity.ERROR,
    fix="Send fewer jobs at a time: make the fan-out smaller, split it, or wait for the end of jobs that are there.",
)
def array_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The engine takes as many jobs at a time as are sent, and lets them run.

    Why: the cells of a fan-out go to the engine as one array, and every task of it counts as a job. A site limits the
    size of an array and the jobs that a user, an account or a QOS may have submitted; more are refused as a whole. It
    limits the jobs that run at a time too; the others wait for them, and all of them where none may run.

    Example:
        submit_job(platform="slurm/cluster", script=train, seeds=2000)  # an array has at most 1001 tasks there

    Instead:
        submit_job(platform="slurm/cluster", script=train, seeds=1000)

    """
    limits = facts.limits
    if limits is None:
        return
    tasks = limits.asked.tasks
    if limits.max_array is not None and tasks > max(limits.max_array, 1):
        yield Found(f"an array of {facts.spec.platform} has at most {limits.max_array:,} tasks, and this one {tasks:,}")
        return
    for limit in limits.ceilings:
        jobs = counted(limit.most, "job")
        if limit.kind == "submitted" and limit.exceeded(limits.asked):
            there = f"{limit.owner} may have {jobs} in the queue and has {limit.used:,}"
            yield Found(f"{there}; this adds {tasks:,}")
        elif limit.kind == "running" and limit.exceeded(limits.asked):
            yield Found(f"{limit.owner} lets no job run", fix="Choose another account or QOS.")
        elif limit.kind == "running" and tasks > limit.left:
            yield Found(
                f"{limit.owner} lets {jobs} run at a time, of which {limit.used:,} do; others wait",
                fix="Expect them to start one after the other.",
                severity=Severity.INFO,
            )
