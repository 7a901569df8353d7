from collections.abc import Iterator

from gpuwarden.core.models import Known
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.command_files import started_file


@rule(
    "PF-PLACE-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Install the program on the machine, or use its full path.",
)
def program_there(facts: SubmitFacts) -> Iterator[Found]:
    """The program that a command starts, and the absolute paths in the command, exist on the machine.

    Why: the job ends immediately if its program is not on the PATH or its script is not at the given path. Only an
    existing machine is checked. If a file other than the one to start is missing, the finding is a warning, since the
    job may create the file. If a cluster's login node lacks a program or a file, the finding is a warning too, since
    the other nodes may have it.

    Example:
        submit_job(platform="ssh/box", command=["torchrun", "/data/train.py"])  # no torchrun on the PATH there

    Instead:
        submit_job(platform="ssh/box", command=["/opt/env/bin/torchrun", "/data/train.py"])

    """
    if not isinstance(facts.readiness, Known):
        return
    there, command = facts.readiness.value, facts.spec.command
    where = there.where or "on the machine"
    if there.no_program:
        yield Found(f"{command[0]} is not {where}", severity=Severity.WARNING if there.where else None)
    for path in there.no_files:
        severity = None if path == started_file(command) and not there.where else Severity.WARNING
        yield Found(f"{path} is not {where}", "Copy it to the machine, or correct the path.", severity)
