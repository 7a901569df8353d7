from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-IN-003", gate="submit", severity=Severity.ERROR, fix=do(Action.SET_ARGUMENT, name="inputs"))
def modules_go_along(facts: SubmitFacts) -> Iterator[Found]:
    """The modules that a program imports from files beside it are among the inputs.

    Why: a machine gets the script and the inputs and nothing else, so that the import of any other file ends the job in
    its first second. A module counts where it is a file or a folder of the working directory that the header does not
    list as a package; modules that it imports itself are followed.

    Example:
        # train.py, beside mynet.py
        from mynet import Net

    Instead:
        submit_job(script="train.py", inputs=["mynet.py"])

    """
    for module, path in facts.local_modules:
        message = f"{module} is imported, and {path} of the working directory does not go along"
        yield Found(message, do(Action.SET_ARGUMENT, name="inputs", add=path))
