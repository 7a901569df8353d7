import re
from collections.abc import Iterator
from typing import Final

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_EXPANDED: Final = re.compile(r"^~|[*?]|\$\w|\$\{")
"""Matches the parts of a path that a shell would expand."""


@rule(
    "PF-OUT-001",
    gate="submit",
    severity=Severity.ERROR,
    fix=do(
        Action.SET_ARGUMENT,
        "to the files or folders that the job must produce, relative to its working folder",
        name="outputs",
    ),
)
def outputs_declared(facts: SubmitFacts) -> Iterator[Found]:
    """The job declares its outputs as literal paths.

    Why: only declared outputs can be pulled, verified and protected from a teardown. Without outputs, the job's files
    are lost with the machine, and the teardown gate has nothing to compare. On a platform that is not metered, missing
    outputs are only a warning. No shell expands an output: `~`, `*` and `$NAME` would be part of a file's name.

    Example:
        submit_job(script=train, outputs=[])
        submit_job(script=train, outputs=["out/*.safetensors"])

    Instead:
        submit_job(script=train, outputs=["out"])

    """
    for output in facts.spec.outputs:
        if _EXPANDED.search(output):
            yield Found(f"{output} is not a literal path, and no shell expands it")
    if facts.spec.outputs:
        return
    severity = None if facts.metered else Severity.WARNING
    yield Found("no outputs are declared, so no file of this job would be kept", severity=severity)
