from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SYS-003",
    gate="submit",
    severity=Severity.INFO,
    fix="Pass check=True, and print stdout and stderr on failure, or don't capture them.",
)
def output_shown(facts: SubmitFacts) -> Iterator[Found]:
    """Programs that the script starts show their output and stop the script when they fail.

    Why: after a failure, a captured error message is missing from the log. If a program fails without stopping the
    script, the script continues, for example with a partial build, and the error that finally ends the job does not
    show the actual cause.

    Example:
        subprocess.run(["nvidia-smi"], capture_output=True)

    Instead:
        subprocess.run(["nvidia-smi"], check=True)

    """
    for shell in facts.uses.shells:
        name = "the program" if shell.program == "?" else shell.program
        if shell.hidden:
            yield Found(f"line {shell.line} captures the output of {name} and never shows it")
        elif not shell.checked:
            yield Found(f"line {shell.line} continues if {name} fails")
