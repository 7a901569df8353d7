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

    Why: a checkpoint written after the pull is in no copy.
    """
    if facts.changed and not facts.gone:
        names = ", ".join(facts.changed[:5])
        yield Found(f"{counted(len(facts.changed), 'file')} on the machine changed after the last pull: {names}")
