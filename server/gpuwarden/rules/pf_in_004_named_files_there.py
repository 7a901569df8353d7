from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.command_files import started_file


@rule("PF-IN-004", gate="submit", severity=Severity.WARNING, fix=do(Action.SET_ARGUMENT, name="inputs"))
def named_files_there(facts: SubmitFacts) -> Iterator[Found]:
    """The inputs include all local files that the command names.

    Why: a job starts in a new working folder that contains only its inputs. A missing file that `python` or `torchrun`
    starts is an error; any other missing file is a warning, since the job may create it.

    Example:
        submit_job(command=["python", "train.py", "--config", "sft.yaml"])

    Instead:
        submit_job(command=["python", "train.py", "--config", "sft.yaml"], inputs=["train.py", "sft.yaml"])

    """
    if facts.files_here is None or facts.uses.typed is not None:
        return  # the platform doesn't accept files; PF-IN-002 reads the settings of bundled trainers
    started = started_file(facts.spec.command).removeprefix("./")
    for path in facts.files_here:
        severity = Severity.ERROR if path == started else None
        message = f"the command starts {path}" if severity else f"the command names {path} in the working directory"
        yield Found(
            f"{message}, which is not among the inputs", do(Action.SET_ARGUMENT, name="inputs", add=path), severity
        )
    there = {file.path for file in facts.inputs}
    if started and not started.startswith("/") and not {*there, *facts.files_here} & {started}:
        yield Found(f"the command starts {started}, which is not among the inputs", severity=Severity.ERROR)
