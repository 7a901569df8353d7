from collections.abc import Iterator

from gpuwarden.core.models import Known
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.command_files import started_file


@rule(
    "PF-PLACE-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Install it there, or name it by its whole path there.",
)
def program_there(facts: SubmitFacts) -> Iterator[Found]:
    """The program that a command starts, and the absolute paths that it names, exist at the place.

    Why: a program that is not on the job's PATH, or a script that is not where the command says, ends the job at once.
    A place that exists already is asked. Another file than the one that is started is a warning, since the job may
    make it; so is what the login node of a cluster lacks, since its other machines may have it.

    Example:
        submit_job(platform="ssh/box", command=["torchrun", "/data/train.py"])  # no torchrun on the PATH there

    Instead:
        submit_job(platform="ssh/box", command=["/opt/env/bin/torchrun", "/data/train.py"])

    """
    if not isinstance(facts.readiness, Known):
        return
    there, command = facts.readiness.value, facts.spec.command
    where = there.where or "at the place"
    if there.no_program:
        yield Found(f"{command[0]} is not {where}", severity=Severity.WARNING if there.where else None)
    for path in there.no_files:
        severity = None if path == started_file(command) and not there.where else Severity.WARNING
        yield Found(f"{path} is not {where}", "Put it there, or correct the path.", severity)
