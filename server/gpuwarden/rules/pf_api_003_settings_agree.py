from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-API-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Make the settings agree.",
)
def settings_agree(facts: SubmitFacts) -> Iterator[Found]:
    """Settings that exclude or require each other are consistent.

    Why: the trainer's constructor fails, but only after the machine has been rented and the model has been downloaded.

    Example:
        TrainingArguments(output_dir="out", fp16=True, bf16=True)

    Instead:
        TrainingArguments(output_dir="out", bf16=True)

    """
    uses = facts.uses
    if "**" in uses.settings:
        return
    if uses.setting("fp16") is True and uses.setting("bf16") is True:
        yield Found("fp16 and bf16 are both set", fix="Keep bf16 on Ampere or newer GPUs, and fp16 on older ones.")
    if uses.setting("load_best_model_at_end") is True:
        evaluates = uses.setting("eval_strategy", uses.setting("evaluation_strategy", "no"))
        saves = uses.setting("save_strategy", "steps")
        if isinstance(evaluates, str) and isinstance(saves, str) and evaluates != saves and saves != "best":
            yield Found(
                f"load_best_model_at_end needs eval_strategy ({evaluates!r}) and save_strategy ({saves!r}) to be equal",
                fix=f"Set eval_strategy={saves!r} and pass an eval_dataset.",
            )
    yield from _groups(facts)


def _groups(facts: SubmitFacts) -> Iterator[Found]:
    """Report a GRPO or RLOO batch that can't be divided into complete groups of completions."""
    uses = facts.uses
    if any(name.partition(".")[0] == "unsloth" for name, _ in uses.imports):
        return  # unsloth adjusts the batch size itself
    if not uses.methods & {"grpo", "rloo"} or "generation_batch_size" in uses.settings:
        return
    group = uses.setting("num_generations", 8 if "grpo" in uses.methods else 2)
    batch = uses.setting("per_device_train_batch_size", 8)
    steps = uses.setting("steps_per_generation", uses.setting("gradient_accumulation_steps", 1))
    if not all(isinstance(n, int) and n > 0 for n in (group, batch, steps)):
        return
    total = batch * steps * (facts.gpu[1] if facts.gpu else 1)
    if total % group:
        yield Found(
            f"{total} completions per step can't be divided into groups of num_generations={group}",
            fix=f"Make per_device_train_batch_size x gradient_accumulation_steps x GPUs a multiple of {group}.",
        )
