from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import line
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use the settings that the trainer has.",
)
def trainer_settings(facts: SubmitFacts) -> Iterator[Found]:
    """The settings of a shipped trainer exist, are complete and are within their limits.

    Why: it would say so itself, and end with exit code 2, on a machine that is paid for by then. A shipped trainer is
    known by its digest; settings in a file of `--config` are left to it.

    Example:
        submit_job(script=shipped_sft, args=["--model", "Qwen/Qwen3-0.6B", "--datset", "trl-lib/Capybara"])

    Instead:
        submit_job(script=shipped_sft, args=["--model", "Qwen/Qwen3-0.6B", "--dataset", "trl-lib/Capybara"])

    """
    run = facts.uses.run
    for message, fix in run.problems if run is not None else ():
        yield Found(line(message), fix=line(fix))
