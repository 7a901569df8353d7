from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Verdict
from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.states import Job
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-LOAD-001",
    gate="teardown",
    severity=Severity.ERROR,
    fix=(do(Action.VERIFY), do(Action.PULL, "again if that fails")),
)
def copy_proven(facts: TeardownFacts) -> Iterator[Found]:
    """The copy has been loaded and found complete since it last changed.

    Why: equal digests prove that the copy is identical to the file, but only loading the copy proves that the file is a
    checkpoint. A file in a format that can't be read causes only a warning (copied, not proven to load) if its copy has
    the same digest as the machine's file. The same applies to an image, table or log that is broken in the same way on
    the machine, and to a file that is only in an artifact store, because it was not loaded here. A file whose content
    begins like a readable format is verified regardless of its name.

    Example:
        pull_artifacts(job_id="j1")
        teardown_request(job_id="j1", verb="terminate")

    Instead:
        pull_artifacts(job_id="j1")
        verify_checkpoint(job_id="j1")  # proven
        teardown_request(job_id="j1", verb="terminate")

    """
    if facts.gone or not facts.dying or any(not f.copied and not f.stored for f in facts.dying):
        return  # TD-COPY-001 reports these
    # If the copy was refuted, copying the same bytes again does not help.
    left_unproven = all(f.stored for f in facts.dying) and facts.copy_verdict in {None, Verdict.UNKNOWN}
    unread = [f for f in facts.dying if not f.copied or left_unproven]
    if unread:
        what = counted(len(unread), "file")
        yield Found(
            f"{what} kept in {facts.store}, but not proven to load: each object has the checksum of the machine's file",
            fix=(do(Action.PULL), "or let the user decide: the files are safe, but it is unknown whether they load."),
            severity=Severity.WARNING,
        )
    if left_unproven:
        return
    if facts.copy_verdict is None:
        yield Found("the copy has not been verified since it last changed")
    elif facts.copy_verdict is Verdict.UNKNOWN and facts.copy_unread:
        what, names = counted(len(facts.copy_unread), "file"), ", ".join(facts.copy_unread[:3])
        yield Found(
            f"{what} copied, but not proven to load: {names} can't be read here. Each copy matches the machine's file",
            fix="Check the copies, or declare narrower outputs.",
            severity=Severity.WARNING,
        )
    elif facts.copy_verdict is Verdict.REFUTED and facts.copy_aside:
        broken, names = counted(len(facts.copy_aside), "file"), ", ".join(facts.copy_aside[:3])
        yield Found(
            f"{broken} broken on the machine and in the copy; none of them is a checkpoint: {names}",
            fix="Check the copies; the originals on the machine are broken in the same way.",
            severity=Severity.WARNING,
        )
    elif facts.copy_verdict is not Verdict.PROVEN:
        message = "; ".join(facts.copy_problems[:3]) or "inconclusive"
        # A failed job often leaves incomplete files. If the copy matches them, the teardown loses no data.
        torn_there = facts.job_state is not Job.SUCCEEDED and facts.copy_equal
        severity = Severity.WARNING if torn_there else None
        same = "The machine's files are the same, so another copy does not help. The user decides." * facts.copy_equal
        yield Found(f"the copy is {facts.copy_verdict}: {message}", fix=same, severity=severity)
