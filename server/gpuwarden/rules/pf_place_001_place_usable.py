from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLACE-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Fix the machine, or choose another platform.",
)
def place_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The machine on which the job would run is usable.

    Why: a job fails before it starts if a folder is not writable or a program is missing. Only an existing machine,
    such as this computer or a host reached over SSH, can be probed before the launch. A rented machine is probed after
    it has started, and a problem there ends the rental.

    Example:
        submit_job(platform="ssh/box", script=train)  # the remote directory can't be written
        submit_job(platform="local", script=train)  # uv is not installed

    Instead:
        submit_job(platform="ssh/other-box", script=train)  # its probe found no problem
        submit_job(platform="local", script=train)  # uv is installed

    """
    yield from facts.reported("PF-PLACE-001")
