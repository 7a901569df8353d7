from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_AFTER_FOUR = ("transformers.", "trl.")
"""Packages whose trainers take at least four arguments before eval_dataset; those of other packages take three."""


@rule(
    "PF-DATA-005",
    gate="submit",
    severity=Severity.ERROR,
    fix='Pass eval_dataset, for example from train_test_split(test_size=0.1), or set eval_strategy="no".',
)
def eval_dataset(facts: SubmitFacts) -> Iterator[Found]:
    """A run that evaluates has an evaluation dataset.

    Why: the trainer's constructor fails if eval_strategy is set without an eval_dataset.

    Example:
        args = TrainingArguments(output_dir="out", eval_strategy="steps")
        Trainer(model=model, args=args, train_dataset=data)

    Instead:
        args = TrainingArguments(output_dir="out", eval_strategy="steps")
        Trainer(model=model, args=args, train_dataset=data, eval_dataset=held_out)

    """
    asked = facts.uses.setting("eval_strategy", facts.uses.setting("evaluation_strategy"))
    if not isinstance(asked, str) or asked == "no":
        return
    for trainer in facts.uses.trainers:
        name = facts.libraries.inherited_class(trainer.name)
        first = 5 if name.endswith(".DPOTrainer") else 4 if name.startswith(_AFTER_FOUR) else 3
        data = (trainer.get("eval_dataset"), trainer.get("evaluator"), *trainer.args[first:])
        if any(value is not None for value in data):
            return
    if facts.uses.trainers:
        line = facts.uses.line_of("eval_strategy")
        yield Found(f"line {line} sets eval_strategy={asked!r}, but no trainer is given an eval_dataset")
