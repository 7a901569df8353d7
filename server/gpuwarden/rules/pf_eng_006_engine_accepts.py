from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import quoted
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-006",
    gate="submit",
    severity=Severity.ERROR,
    fix="Change what the engine refuses.",
)
def engine_accepts(facts: SubmitFacts) -> Iterator[Found]:
    """The engine itself would take the job.

    Why: only the engine knows all of its site's limits and plug-ins. It is asked to check exactly this job and to start
    nothing, so that a refusal comes before anything is sent.

    Example:
        submit_job(platform="slurm/cluster", options={"constraint": "a100"}, script=train)  # no machine has that

    Instead:
        submit_job(platform="slurm/cluster", options={"constraint": "gpu80"}, script=train)

    """
    if facts.limits is not None and facts.limits.refusal:
        yield Found(f"{facts.spec.platform} would refuse the job: {quoted(facts.limits.refusal)}")
