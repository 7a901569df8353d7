from collections.abc import Iterator

from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-008",
    gate="submit",
    severity=Severity.ERROR,
    fix="Submit fewer jobs at a time: make the fan-out smaller, split it, or wait for current jobs to end.",
)
def array_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The engine accepts all jobs in the submission at once and lets them run.

    Why: the cells of a fan-out are submitted to the engine as one array, and each of the array's tasks counts as a job.
    A site limits the size of an array and the number of jobs that a user, an account or a QOS has submitted; if an
    array exceeds a limit, all of its tasks are rejected. The site also limits the number of running jobs: further jobs
    wait, and if the limit is 0, all jobs wait.

    Example:
        submit_job(platform="slurm/cluster", script=train, seeds=2000)  # an array has at most 1001 tasks there

    Instead:
        submit_job(platform="slurm/cluster", script=train, seeds=1000)

    """
    limits = facts.limits
    if limits is None:
        return
    tasks = limits.request.tasks
    if limits.max_array is not None and tasks > max(limits.max_array, 1):
        yield Found(
            f"an array on {facts.spec.platform} has at most {limits.max_array:,} tasks, but this one has {tasks:,}"
        )
        return
    for limit in limits.ceilings:
        jobs = counted(limit.most, "job")
        if limit.kind == "submitted" and limit.exceeded(limits.request):
            there = f"{limit.owner} may have {jobs} in the queue and has {limit.used:,}"
            yield Found(f"{there}; this submission adds {tasks:,}")
        elif limit.kind == "running" and limit.exceeded(limits.request):
            yield Found(f"{limit.owner} does not allow any job to run", fix="Choose another account or QOS.")
        elif limit.kind == "running" and tasks > limit.left:
            yield Found(
                f"{limit.owner} allows {jobs} to run at once, and {limit.used:,} are running; further jobs wait",
                fix="The jobs will start one after another.",
                severity=Severity.INFO,
            )
