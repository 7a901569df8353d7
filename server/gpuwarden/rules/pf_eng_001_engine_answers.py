from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ENG-001",
    gate="submit",
    severity=Severity.UNKNOWN,
    fix=("Check that the engine is up and that its commands work there.", do(Action.RETRY)),
)
def engine_answers(facts: SubmitFacts) -> Iterator[Found]:
    """The engine that would run the job says what it allows.

    Why: a scheduler that is down, too old or answers something unexpected can't be read, and a job that is sent to it
    blindly may be lost, run twice or wait for ever. What is not known is never read as "no limit".

    Example:
        submit_job(platform="slurm/cluster", script=train)  # its controller is down

    Instead:
        submit_job(platform="slurm/cluster", script=train)  # once `sinfo` answers again

    """
    unusable = any(f.rule == "PF-PLACE-001" and f.blocks for f in facts.looked)  # which is why, and said by that rule
    if isinstance(facts.engine, Unknown) and not unusable:
        yield Found(f"{facts.spec.platform} does not say what it allows: {facts.engine.why}")
    elif facts.limits is not None and facts.limits.unread:
        yield Found(f"{facts.spec.platform} enforces what it does not say: {facts.limits.unread}")
