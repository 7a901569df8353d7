from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-007",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use an accepted value.",
)
def values_accepted(facts: SubmitFacts) -> Iterator[Found]:
    """An argument or flag with a fixed set of values is set to one of them.

    Why: the library rejects any other value when the script starts. If the library documents the values but is not
    known to check them, the finding is a warning.

    Example:
        # dependencies = ["transformers>=5"]
        from transformers import TrainingArguments
        TrainingArguments(output_dir="out", eval_strategy="step")

    Instead:
        # dependencies = ["transformers>=5"]
        from transformers import TrainingArguments
        TrainingArguments(output_dir="out", eval_strategy="steps")

    """
    uses = facts.uses
    for misfit in facts.libraries.choices(uses.calls):
        yield Found(misfit.message, fix=misfit.fix, severity=None if misfit.sure else Severity.WARNING)
    if uses.command_line is not None and uses.typed is None:
        for misfit in facts.libraries.flag_choices(uses.command_line, uses.flags):
            yield Found(misfit.message, fix=misfit.fix)
