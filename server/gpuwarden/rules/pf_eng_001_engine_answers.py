from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-001",
    gate="submit",
    severity=Severity.UNKNOWN,
    fix=("Check that the engine is up and that its commands work on the machine.", do(Action.RETRY)),
)
def engine_answers(facts: SubmitFacts) -> Iterator[Found]:
    """The engine that would run the job reports its limits.

    Why: a scheduler may be down or too old, or give an unexpected answer. If a job is submitted while the engine's
    limits are unknown, it may be lost, run twice or wait forever. An unknown limit is never treated as "no limit".

    Example:
        submit_job(platform="slurm/cluster", script=train)  # its controller is down

    Instead:
        submit_job(platform="slurm/cluster", script=train)  # once `sinfo` answers again

    """
    unusable = any(f.rule == "PF-PLACE-001" and f.blocks for f in facts.looked)  # PF-PLACE-001 reports the cause
    if isinstance(facts.engine, Unknown) and not unusable:
        yield Found(f"{facts.spec.platform} does not report its limits: {facts.engine.why}")
    elif facts.limits is not None and facts.limits.unread:
        yield Found(f"{facts.spec.platform} enforces limits that it does not report: {facts.limits.unread}")
