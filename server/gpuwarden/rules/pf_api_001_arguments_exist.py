from collections.abc import Iterator, Mapping

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.ecosystem_tables import (
    CONFIGS,
    GONE_ARGUMENTS,
    GONE_LOAD_ARGUMENTS,
    GONE_TRAINER_ARGUMENTS,
    TRAINERS,
    Gone,
    read_requirement,
)
from gpuwarden.scripts.static_eval import Call


@rule(
    "PF-API-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Rename the argument.",
)
def arguments_exist(facts: SubmitFacts) -> Iterator[Found]:
    """Arguments of trainers and configs exist in the versions that the header asks for.

    Why: they are renamed between versions, and examples live longer than versions. A header that pins an older
    version, in which the argument still exists, is left alone.

    Example:
        # dependencies = ["transformers>=5"]
        TrainingArguments(output_dir="out", evaluation_strategy="steps")

    Instead:
        # dependencies = ["transformers>=5"]
        TrainingArguments(output_dir="out", eval_strategy="steps")

    """
    # unsloth takes several old names itself, in its own classes and in the trainers that it patches.
    patched = any(name.partition(".")[0] == "unsloth" for name, _ in facts.uses.imports)
    header = facts.script.header if facts.script else None
    wanted = [r for d in (header.dependencies if header else ()) if (r := read_requirement(d))]
    for call in facts.uses.calls:
        if patched and call.last in TRAINERS:
            continue
        if "unsloth" in call.name or call.last.startswith("Fast"):
            continue
        for name, gone in _gone_for(call).items():
            pinned = any(r.name == gone.package and r.surely_below(gone.since) for r in wanted)
            if name in call.kwargs and not pinned:
                yield Found(
                    f"line {call.line}: {call.last} has no argument {name} since {gone.package} {gone.since}",
                    fix=f"Use {gone.instead}.",
                )


def _gone_for(call: Call) -> Mapping[str, Gone]:
    if call.last in CONFIGS or call.last.endswith("TrainingArguments"):
        return GONE_ARGUMENTS
    if call.last in TRAINERS:
        return GONE_TRAINER_ARGUMENTS
    if call.last in {"Trainer", "Seq2SeqTrainer"} and call.name.startswith("transformers."):
        return {"tokenizer": Gone("transformers", "5.0", "processing_class")}
    if call.last == "from_pretrained" and call.name.startswith("transformers."):
        return GONE_LOAD_ARGUMENTS
    return {}
