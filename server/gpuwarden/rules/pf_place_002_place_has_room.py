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
    """The place has room on its disk.

    Why: a checkpoint that meets a full disk is cut short, and the job that saved it often runs on. The free space is
    measured when the place is probed and compared with a fixed minimum; how much the job will save is unknown then.

    Example:
        submit_job(platform="ssh/box", script=train)  # 1 GB is free on its disk
        submit_job(platform="local", script=train)  # the run root is on a nearly full disk

    Instead:
        submit_job(platform="ssh/box", script=train)  # after old checkpoints were deleted
        submit_job(platform="local", script=train)  # with another run root

    """
    yield from facts.reported("PF-PLACE-002")
