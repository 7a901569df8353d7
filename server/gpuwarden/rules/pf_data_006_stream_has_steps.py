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

    Why: a stream has no known length, so the trainer can't compute epochs and fails at the start.

    Example:
        data = load_dataset("HuggingFaceFW/fineweb", split="train", streaming=True)
        Trainer(model=model, train_dataset=data, args=TrainingArguments(output_dir="out"))

    Instead:
        data = load_dataset("HuggingFaceFW/fineweb", split="train", streaming=True)
        Trainer(model=model, train_dataset=data, args=TrainingArguments(output_dir="out", max_steps=1000))

    """
    uses = facts.uses
    streamed = any(c.kwargs.get("streaming") is True for c in uses.calls if c.last == "load_dataset" and not c.maybe)
    given = "max_steps" in uses.settings or "**" in uses.settings
    if streamed and uses.trainers and not given and not uses.called("from_generator", "from_list", "take"):
        yield Found("the dataset is streamed, but max_steps is not set")
