from collections.abc import Iterator

from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-OUT-002",
    gate="teardown",
    severity=Severity.ERROR,
    fix="Change the job to write plain files with plain names.",
)
def outputs_copyable(facts: TeardownFacts) -> Iterator[Found]:
    """Everything in a declared output can be copied.

    Why: links that point outside their folder, sockets and names that can't be decoded as UTF-8 are not pulled, so no
    proof covers them. Following a link could copy any file on the machine, or hide that the real checkpoint is outside
    the declared outputs.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # out/cache is a link to /opt/cache

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # out contains plain files only

    """
    if facts.skipped and not facts.gone:
        names = ", ".join(facts.skipped[:5])
        yield Found(f"{counted(len(facts.skipped), 'item')} in the declared outputs can't be copied: {names}")
