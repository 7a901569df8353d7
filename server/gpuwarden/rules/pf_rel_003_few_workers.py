from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

MOST = 4


@rule(
    "PF-REL-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Use at most 4 workers per GPU, unless the machine is known to have enough cores, memory and shared memory.",
)
def few_workers(facts: SubmitFacts) -> Iterator[Found]:
    """Only a few workers load the data.

    Why: each worker is a process with its own copy of the data. Small instances have four cores, and containers have 64
    MB of shared memory. If memory runs out, the kernel kills the job.

    Example:
        TrainingArguments(output_dir="out", dataloader_num_workers=32)

    Instead:
        TrainingArguments(output_dir="out", dataloader_num_workers=4)

    """
    number, line = facts.uses.setting("dataloader_num_workers"), facts.uses.line_of("dataloader_num_workers")
    if not isinstance(number, int):
        loaders = [
            c for c in facts.uses.calls if c.last == "DataLoader" and isinstance(c.kwargs.get("num_workers"), int)
        ]
        number, line = max(((c.kwargs["num_workers"], c.line) for c in loaders), default=(0, 0))
    if number > MOST and not facts.proven_script:
        yield Found(f"line {line} starts {number} data workers")
