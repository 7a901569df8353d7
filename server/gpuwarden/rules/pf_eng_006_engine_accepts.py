from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import quoted
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-006",
    gate="submit",
    severity=Severity.ERROR,
    fix="Change the setting that the engine rejects.",
)
def engine_accepts(facts: SubmitFacts) -> Iterator[Found]:
    """The engine itself would accept the job.

    Why: only the engine knows all of its site's limits and plug-ins. It checks this exact job in a dry run, so that a
    refusal is known before the job is submitted.

    Example:
        submit_job(platform="slurm/cluster", options={"constraint": "a100"}, script=train)  # no machine has that

    Instead:
        submit_job(platform="slurm/cluster", options={"constraint": "gpu80"}, script=train)

    """
    if facts.limits is not None and facts.limits.refusal:
        yield Found(f"{facts.spec.platform} would refuse the job: {quoted(facts.limits.refusal)}")
