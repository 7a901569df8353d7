from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-ELSE-001",
    gate="teardown",
    severity=Severity.WARNING,
    fix="Make sure that these processes and files are no longer needed.",
)
def nothing_else(facts: TeardownFacts) -> Iterator[Found]:
    """The machine has no other processes and no recent files.

    Why: the user's own shells, downloads and files on the machine would also be lost. gpuwarden can't decide whether
    they matter, so the finding is shown to the user who approves the teardown.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # the user edits /opt/notes.txt in vim there

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # only the job's own processes and files were found

    """
    if facts.gone:
        return
    if isinstance(facts.disclosure, Unknown):
        yield Found(f"other processes and files on the machine could not be listed: {facts.disclosure.why}")
        return
    found = facts.disclosure.value
    if not found.complete:
        yield Found("some processes or files on the machine could not be inspected")
    if found.processes:
        strangers = counted(len(found.processes), "process", "processes")
        yield Found(f"the machine runs {strangers} that belong to no job: {'; '.join(found.processes[:5])}")
    files = [f for f in found.files if not checkpoint_like(f.path)]  # TD-ELSE-002 reports the others
    if files:
        names = ", ".join(f.path for f in files[:5])
        yield Found(f"the machine has {counted(len(files), 'recent file')} that no job declared: {names}")
