from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-REL-002",
    gate="submit",
    severity=Severity.WARNING,
    fix='Use optim="adamw_torch" unless memory is scarce. 8-bit optimizers suit QLoRA and scripts that have succeeded.',
)
def plain_optimizer(facts: SubmitFacts) -> Iterator[Found]:
    """A first run uses the plain optimizer unless memory is scarce.

    Why: 8-bit optimizers need bitsandbytes with kernels for the image's CUDA version, which is another possible cause
    of failure in a first run. They save about 6 bytes per trained parameter, which matters for full fine-tuning but
    hardly for LoRA.

    Example:
        TrainingArguments(output_dir="out", optim="adamw_bnb_8bit")

    Instead:
        TrainingArguments(output_dir="out", optim="adamw_torch")

    """
    optimizer = facts.uses.setting("optim")
    quantized = any(c.kwargs.get("load_in_4bit") is True for c in facts.uses.calls)
    small = isinstance(optimizer, str) and ("8bit" in optimizer or "4bit" in optimizer)
    if small and not quantized and not facts.proven_script:
        yield Found(f"line {facts.uses.line_of('optim')} uses optim={optimizer!r}")
