from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-DATA-006",
    gate="submit",
    severity=Severity.ERROR,
    fix="Set max_steps in the training arguments.",
)
def stream_has_steps(facts: SubmitFacts) -> Iterator[Found]:
    """A run that trains on a streamed dataset sets its number of steps.

    Why: a stream has no known length, so the trainer can't compute epochs and fails at the start. A stream that is only
    inspected or used for evaluation is ignored. If it is unknown whether the stream is the training set, the finding is
    a warning.

    Example:
        data = load_dataset("HuggingFaceFW/fineweb", split="train", streaming=True)
        Trainer(model=model, train_dataset=data, args=TrainingArguments(output_dir="out"))

    Instead:
        data = load_dataset("HuggingFaceFW/fineweb", split="train", streaming=True)
        Trainer(model=model, train_dataset=data, args=TrainingArguments(output_dir="out", max_steps=1000))

    """
    uses = facts.uses
    if uses.streams is not False and not {"max_steps", "**"} & uses.settings.keys():
        known = "the training set is streamed" if uses.streams else "it is unknown whether the training set is streamed"
        yield Found(f"{known}, and max_steps is not set", severity=None if uses.streams else Severity.WARNING)
