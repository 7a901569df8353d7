from collections.abc import Iterator

from gpuwarden.core.plural import counted
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-IN-001",
    gate="submit",
    severity=Severity.INFO,
    fix="Compare the list with the files that the job opens.",
)
def inputs_listed(facts: SubmitFacts) -> Iterator[Found]:
    """The files that are copied to the machine and those that are left out are listed.

    Why: hidden files, environments and caches are left out. A job that needs one of them fails on the machine.

    Example:
        submit_job(inputs=["code"], command=["python", "code/train.py"])  # code/.env is left out

    Instead:
        submit_job(script=train)  # no inputs: nothing is copied

    """
    if not facts.inputs:
        return
    size = sum(file.size for file in facts.inputs)
    left = ", ".join(facts.inputs_left_out[:5]) + (", ..." if len(facts.inputs_left_out) > 5 else "")
    verb = "is" if len(facts.inputs) == 1 else "are"
    what = f"{counted(len(facts.inputs), 'file')}, {size:,} bytes, {verb} copied to the machine"
    yield Found(what + (f"; left out: {left}" if left else ""))
