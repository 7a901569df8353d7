from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-008",
    gate="submit",
    severity=Severity.WARNING,
    fix="Use the new name.",
)
def arguments_current(facts: SubmitFacts) -> Iterator[Found]:
    """Arguments are not deprecated in the releases that the header requires.

    Why: a later release will remove them, and a header without an upper version bound allows that release.

    Example:
        # dependencies = ["trl==0.12.2", "transformers==4.46.3"]
        from trl import SFTTrainer
        SFTTrainer(model="m", args=config, tokenizer=tokenizer)

    Instead:
        # dependencies = ["trl==0.12.2", "transformers==4.46.3"]
        from trl import SFTTrainer
        SFTTrainer(model="m", args=config, processing_class=tokenizer)

    """
    for misfit in facts.libraries.deprecated(facts.uses.calls):
        yield Found(misfit.message, fix=misfit.fix)
