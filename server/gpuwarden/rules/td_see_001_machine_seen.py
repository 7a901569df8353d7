from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-SEE-001",
    gate="teardown",
    severity=Severity.UNKNOWN,
    fix="Call again in a minute. If the machine is off, start it on the platform first.",
)
def machine_seen(facts: TeardownFacts) -> Iterator[Found]:
    """The machine and its files can be read.

    Why: files that can't be read can't be proven safe. If the provider does not answer or the machine can't be reached,
    the files are unknown, and unknown is never treated as empty: an unreachable machine may have the only copy of a
    finished model.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # the machine does not answer, so its files are unknown

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # a minute later its files could be listed

    """
    if isinstance(facts.machine, Unknown):
        yield Found(f"the provider did not return a usable answer about the instance: {facts.machine.why}")
    elif not facts.gone and isinstance(facts.files, Unknown):
        yield Found(f"the files on the machine can't be listed: {facts.files.why}")
