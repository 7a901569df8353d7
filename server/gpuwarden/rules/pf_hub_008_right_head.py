from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_TALKS = frozenset({"sft", "dpo", "orpo", "cpo", "kto", "grpo", "rloo"})
_ENCODERS = ("ForMaskedLM", "ForPreTraining", "ForImageClassification", "ForObjectDetection", "ForTokenClassification")


@rule(
    "PF-HUB-008",
    gate="submit",
    severity=Severity.WARNING,
    fix="Train a causal language model with this method.",
)
def right_head(facts: SubmitFacts) -> Iterator[Found]:
    """The model has the architecture that the method trains.

    Why: an encoder is loaded as a language model with a randomly initialized head, or can't be loaded at all.

    Example:
        SFTTrainer(model="google-bert/bert-base-uncased", train_dataset=data)  # BertForMaskedLM

    Instead:
        SFTTrainer(model="Qwen/Qwen2.5-0.5B", train_dataset=data)  # Qwen2ForCausalLM

    """
    model = facts.hub.model if facts.hub else None
    if model is None or not facts.uses.methods & _TALKS:
        return
    wrong = [a for a in model.repo.arch if a.endswith(_ENCODERS)]
    if wrong:
        yield Found(f"{model.where} is a {wrong[0]}, but {min(facts.uses.methods)} trains causal language models")
