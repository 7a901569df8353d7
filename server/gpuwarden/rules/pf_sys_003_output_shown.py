from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SYS-003",
    gate="submit",
    severity=Severity.INFO,
    fix="Pass check=True and print stdout and stderr when it fails, or don't capture them.",
)
def output_shown(facts: SubmitFacts) -> Iterator[Found]:
    """Programs that the script starts show their output and stop the script when they fail.

    Why: when the job failed, a captured error message is the one thing that is missing. A program that fails
    without stopping the script is worse: the script goes on with half a build, and the error that ends the job has
    another cause than the one that it names.

    Example:
        subprocess.run(["nvidia-smi"], capture_output=True)

    Instead:
        subprocess.run(["nvidia-smi"], check=True)

    """
    for shell in facts.uses.shells:
        if shell.hidden:
            yield Found(f"line {shell.line} captures the output of {shell.program} and never shows it")
        elif not shell.checked:
            yield Found(f"line {shell.line} goes on when {shell.program} fails")
