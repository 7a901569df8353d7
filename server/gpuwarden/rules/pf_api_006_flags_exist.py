from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-006",
    gate="submit",
    severity=Severity.ERROR,
    fix="Correct the flag.",
)
def flags_exist(facts: SubmitFacts) -> Iterator[Found]:
    """The script declares every flag that is passed to it.

    Why: the parser rejects an unknown flag, and the job fails within seconds, after the machine has been rented. The
    rule analyzes argparse parsers and parsers that create flags from dataclasses in the script or in released
    libraries. If the parser ignores unknown flags, the training starts without the intended setting. In that case, a
    misspelled flag is an error, and any other unknown flag is a warning. A parser that other code may extend is not
    checked.

    Example:
        # dependencies = ["trl>=1.16"]
        submit_job(script=sft, args=["--learning_rat", "2e-5"])

    Instead:
        # dependencies = ["trl>=1.16"]
        submit_job(script=sft, args=["--learning_rate", "2e-5"])

    """
    line = facts.uses.command_line
    if line is not None and facts.uses.typed is None:
        for misfit in facts.libraries.flags(line, facts.uses.flags):
            yield Found(misfit.message, fix=misfit.fix, severity=None if misfit.sure else Severity.WARNING)
