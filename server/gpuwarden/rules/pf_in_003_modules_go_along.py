from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-IN-003", gate="submit", severity=Severity.ERROR, fix=do(Action.SET_ARGUMENT, name="inputs"))
def modules_go_along(facts: SubmitFacts) -> Iterator[Found]:
    """The local modules that a program imports are among the inputs.

    Why: a machine gets only the script and the inputs, so importing any other file ends the job in its first second. A
    module is local if it is a file or folder in the working directory that the header does not list as a package. The
    imports of local modules are checked too.

    Example:
        # train.py, next to mynet.py
        from mynet import Net

    Instead:
        submit_job(script="train.py", inputs=["mynet.py"])

    """
    for module, path in facts.local_modules:
        message = f"{module} is imported, but {path} in the working directory is not among the inputs"
        yield Found(message, do(Action.SET_ARGUMENT, name="inputs", add=path))
