from collections.abc import Iterator
from typing import Final

from gpuwarden.core.engine import Ceiling
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

WORDS: Final = {"cpu": "processors", "mem": "MB of memory", "node": "machines", "gres/gpu": "GPUs", "wall": "walltime"}


@rule(
    "PF-ENG-009",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(
        Action.SET_ARGUMENT, "to stay within the limits of the account and the QOS, or choose others", name="options"
    ),
)
def limits_leave_room(facts: SubmitFacts) -> Iterator[Found]:
    """The job fits within the limits of its account and QOS, and their machine-time budgets cover it.

    Why: an engine accepts a job that is too large for its account and leaves it waiting forever. The only sign is the
    reason in the engine's job list, such as `QOSMaxCpuPerJobLimit`. If a budget is used up, the account's jobs do not
    start.

    Example:
        submit_job(platform="slurm/cluster", gpu="a100", gpu_count=8, script=train)  # the QOS allows four

    Instead:
        submit_job(platform="slurm/cluster", gpu="a100", gpu_count=4, script=train)

    """
    limits = facts.limits
    for limit in limits.ceilings if limits is not None else ():
        if (
            limits is not None
            and limit.kind in ("job", "machine", "minutes", "job_minutes")
            and limit.exceeded(limits.request)
        ):
            yield Found(_sentence(limit, limit.wanted(limits.request)))


def _sentence(limit: Ceiling, wanted: int) -> str:
    what = WORDS.get(limit.resource, limit.resource)
    if limit.kind == "minutes":
        left = f"{limit.left:,} of {limit.most:,} minutes of {what} left"
        return f"{limit.owner} has {left}, but the job may use {wanted:,}"
    if limit.kind == "job_minutes":
        return f"{limit.owner} allows a job {limit.most:,} minutes of {what}, but this one may use {wanted:,}"
    of = "each machine of a job" if limit.kind == "machine" else "a job"
    return f"{limit.owner} allows {of} {limit.most:,} {what}, but this one requests {wanted:,}"
