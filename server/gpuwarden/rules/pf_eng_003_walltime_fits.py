from collections.abc import Iterator

from gpuwarden.core.engine import UNLIMITED
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-003",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(Action.SET_ARGUMENT, "lower", name="timeout_s"),
)
def walltime_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The allocation is not longer than the queue, the account and the QOS allow.

    Why: an engine rejects a job that is too long for its queue, or accepts it and leaves it waiting forever. The
    allocation is the job's timeout plus some time to start and save. `options.walltime_s` splits a longer job into
    several allocations: the job saves, is queued again and continues from its checkpoint.

    Example:
        submit_job(platform="slurm/cluster", timeout_s=172_800, script=train)  # the partition's limit is 24 hours

    Instead:
        submit_job(platform="slurm/cluster", timeout_s=80_000, script=train)
        submit_job(platform="slurm/cluster", timeout_s=172_800, options={"walltime_s": 86_400}, script=train)

    """
    limits = facts.limits
    if limits is None or limits.queue is None or limits.request.walltime_s is None:
        return
    walltime = limits.request.walltime_s
    most: dict[str, int | None] = {f"the queue {limits.queue.name}": limits.queue.max_s}
    most |= {limit.owner: limit.most for limit in limits.ceilings if limit.kind == "walltime"}
    for what, seconds in most.items():
        if seconds is None or seconds >= UNLIMITED or walltime <= seconds:
            continue
        cut = facts.spec.options.get("walltime_s") is not None
        room = walltime - (facts.spec.timeout_s or 0)
        name, highest = ("options.walltime_s", seconds) if cut else ("timeout_s", seconds - room)
        shorter = do(Action.SET_ARGUMENT, name=name, at_most=max(highest, 1))
        several = do(Action.SET_ARGUMENT, alternative=True, name="options.walltime_s", at_most=seconds)
        yield Found(
            f"the job needs an allocation of {walltime} s, but {what} allows {seconds} s",
            fix=shorter if cut else (shorter, several),
        )
