from collections.abc import Iterator

from gpuwarden.core.models import Unknown
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.rules.facts import TeardownFacts


@rule("TD-ELSE-001", gate="teardown", severity=Severity.WARNING, fix="Make sure that nobody needs it.")
def nothing_else(facts: TeardownFacts) -> Iterator[Found]:
    """Nothing else lives on the machine.

    Why: a person's own shell, download or file there ends with it too. It is not ours to judge, so it is shown.
    """
    if facts.gone:
        return
    if isinstance(facts.disclosure, Unknown):
        yield Found(f"what else lives on the machine could not be seen: {facts.disclosure.why}")
        return
    found = facts.disclosure.value
    if not found.complete:
        yield Found("not everything that lives on the machine could be looked at")
    if found.processes:
        strangers = counted(len(found.processes), "process", "processes")
        yield Found(f"{strangers} of no job of ours: {'; '.join(found.processes[:5])}")
    files = [f for f in found.files if not checkpoint_like(f.path)]  # TD-ELSE-002 speaks of the others
    if files:
        names = ", ".join(f.path for f in files[:5])
        yield Found(f"{counted(len(files), 'recent file')} that no job declared: {names}")
