from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-COPY-002", gate="teardown", severity=Severity.ERROR, fix=do(Action.PULL, "again; only changed files are sent")
)
def manifest_current(facts: TeardownFacts) -> Iterator[Found]:
    """The copy was made after the last write on the machine.

    Why: a checkpoint that was written after the pull is not in the copy, and the newest checkpoint usually matters
    most. The size and modification time of every declared file are compared with the pull's manifest. A second pull
    transfers only changed files.

    Example:
        pull_artifacts(job_id="j1")  # afterwards the job writes out/checkpoint-200
        teardown_request(job_id="j1", verb="terminate")

    Instead:
        pull_artifacts(job_id="j1")  # after the last write
        teardown_request(job_id="j1", verb="terminate")

    """
    if facts.changed and not facts.gone:
        names = ", ".join(facts.changed[:5])
        yield Found(f"{counted(len(facts.changed), 'file')} on the machine changed after the last pull: {names}")
