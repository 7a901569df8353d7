from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts

SHOWN = 5


@rule("TD-COPY-001", gate="teardown", severity=Severity.ERROR, fix=do(Action.PULL))
def copy_exists(facts: TeardownFacts) -> Iterator[Found]:
    """Every declared file that the teardown destroys has a copy elsewhere with the same digest.

    Why: a log line that says "saved" is only a claim. A file whose only copy is on the machine is lost with it. A copy
    is a pulled file, or an object in the artifact store whose checksum, computed by the store, matches the machine's
    file.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # out/model.safetensors exists only on the machine

    Instead:
        pull_artifacts(job_id="j1")
        teardown_request(job_id="j1", verb="terminate")

    """
    if facts.gone:
        return
    bare = [f for f in facts.dying if not f.copied and not f.stored]
    if bare:
        more = f" and {len(bare) - SHOWN} more" if len(bare) > SHOWN else ""
        names = ", ".join(f.path for f in bare[:SHOWN]) + more
        what = f"{counted(len(bare), 'declared file')}, {sum(f.size for f in bare):,} bytes"
        store = f". {facts.store}: {facts.store_why}" if facts.store_why else ""
        yield Found(f"{facts.verb} would delete {what}, without a copy: {names}{store}")
