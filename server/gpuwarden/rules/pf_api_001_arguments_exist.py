from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.signatures.advice import LOADING
from gpuwarden.static_analysis.signatures.tables import version


@rule(
    "PF-API-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Rename the argument.",
)
def arguments_exist(facts: SubmitFacts) -> Iterator[Found]:
    """Arguments that the script passes to training libraries exist in the releases that the header requires.

    Why: arguments are renamed between releases, but examples keep the old names. The valid names are read from the
    released wheels. Calls that accept any argument, releases newer than all tables, and classes that unsloth replaces
    are not checked. Without a header, the release is unknown, and an argument that only some releases have is reported
    as a warning.

    Example:
        # dependencies = ["transformers>=5"]
        from transformers import TrainingArguments
        TrainingArguments(output_dir="out", evaluation_strategy="steps")

    Instead:
        # dependencies = ["transformers>=5"]
        from transformers import TrainingArguments
        TrainingArguments(output_dir="out", eval_strategy="steps")

    """
    for misfit in facts.libraries.arguments(facts.uses.calls):
        yield Found(misfit.message, fix=misfit.fix, severity=None if misfit.sure else Severity.WARNING)
    loads = [c for c in facts.uses.calls if c.last == "from_pretrained" and c.name.startswith("transformers.")]
    chosen = facts.libraries.chosen.get("transformers") if loads else None
    release = version(chosen.releases[0]) if chosen else None
    for call in loads if release else ():
        for name, (since, instead) in LOADING.items():
            gone = version(since)
            if name in call.kwargs and gone and release and release >= gone:
                message = f"line {call.line}: transformers {since} removed the argument {name} from {call.last}"
                sure = chosen is not None and chosen.named and call.certain
                yield Found(message, fix=f"Use {instead}.", severity=None if sure else Severity.WARNING)
