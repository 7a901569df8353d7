from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-SEE-001",
    gate="teardown",
    severity=Severity.UNKNOWN,
    fix="Call again in a minute. A machine that is off has to be started on its platform first.",
)
def machine_seen(facts: TeardownFacts) -> Iterator[Found]:
    """The machine and its files can be seen.

    Why: what can't be seen can't be proven safe. A provider that does not answer and a machine that can't be
    reached leave the files unknown, and unknown is never treated as empty: an unreachable machine may have the only
    copy of a finished model.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # the machine does not answer, so its files are unknown

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # a minute later its files could be listed

    """
    if isinstance(facts.machine, Unknown):
        yield Found(f"the provider gave no usable answer about the instance: {facts.machine.why}")
    elif not facts.gone and isinstance(facts.files, Unknown):
        yield Found(f"the files on the machine can't be listed: {facts.files.why}")
