from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLACE-002",
    gate="submit",
    severity=Severity.WARNING,
    fix="Free some space first.",
)
def place_has_room(facts: SubmitFacts) -> Iterator[Found]:
    """The machine has enough free disk space.

    Why: on a full disk, checkpoints are truncated, and the job often continues. The probe compares the machine's free
    space with a fixed minimum, because the size of the job's files is not known in advance.

    Example:
        submit_job(platform="ssh/box", script=train)  # 1 GB is free on its disk
        submit_job(platform="local", script=train)  # the run root is on a nearly full disk

    Instead:
        submit_job(platform="ssh/box", script=train)  # after old checkpoints were deleted
        submit_job(platform="local", script=train)  # with another run root

    """
    yield from facts.reported("PF-PLACE-002")
