from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Unknown
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.rules.facts import TeardownFacts

SHOWN = 5


@rule(
    "TD-ELSE-002",
    gate="teardown",
    severity=Severity.ERROR,
    fix=(do(Action.PULL, "for each of these paths", also=("PATH",)), do(Action.VERIFY)),
)
def no_undeclared_checkpoint(facts: TeardownFacts) -> Iterator[Found]:
    """The declared outputs cover every checkpoint in the job's working folder.

    Why: weights that a job saved to an undeclared path are not proven, and the teardown would delete them. Declare and
    pull the files before the teardown, or let the user accept the loss by typing the file names at a terminal. Other
    folders on the machine are not searched. If the machine can't be inspected, the last check that found such a
    checkpoint still applies.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # outputs=["out"], and the job saved extra/model.safetensors

    Instead:

        pull_artifacts(job_id="j1", also=["extra"])
        verify_checkpoint(job_id="j1", level="load")
        teardown_request(job_id="j1", verb="terminate")

    """
    if facts.gone:
        return
    if isinstance(facts.disclosure, Unknown):
        if facts.checkpoint_before:
            yield Found(facts.checkpoint_before)
        return
    found = [f for f in facts.disclosure.value.files if checkpoint_like(f.path)]
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        names = ", ".join(f.path for f in found[:SHOWN]) + more
        what = f"{counted(len(found), 'file')}, {sum(f.size for f in found):,} bytes"
        yield Found(f"the declared outputs do not cover a checkpoint, {what}: {names}")
