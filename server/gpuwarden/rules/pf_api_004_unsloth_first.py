from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_PATCHED = frozenset({"transformers", "trl", "peft"})


@rule(
    "PF-API-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Import unsloth before transformers, trl and peft.",
)
def unsloth_first(facts: SubmitFacts) -> Iterator[Found]:
    """Unsloth is imported before the libraries that it patches.

    Why: if unsloth is imported later, it prints a warning and patches only some of the code. Training is then slower,
    needs more memory and may give wrong results.

    Example:
        from trl import SFTTrainer
        from unsloth import FastLanguageModel

    Instead:
        from unsloth import FastLanguageModel
        from trl import SFTTrainer

    """
    lines = {name.partition(".")[0]: line for name, line in reversed(facts.uses.imports)}
    late = sorted(m for m in _PATCHED if m in lines and lines[m] < lines.get("unsloth", 0))
    if late:
        yield Found(f"line {lines['unsloth']} imports unsloth after {', '.join(late)}")
