from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-REL-001",
    gate="submit",
    severity=Severity.WARNING,
    fix="Omit torch.compile in the first run. Turn it on after the job has succeeded, on an Ampere or newer GPU.",
)
def torch_compile(facts: SubmitFacts) -> Iterator[Found]:
    """torch.compile is used only after the script has succeeded once.

    Why: compilation saves 10 to 20 % of the time but can fail in additional ways, with misleading messages: no compiler
    in the image, recompilation at every new sequence length, bf16 kernels on a T4. In a first run, these failures hide
    whether the script itself works.

    Example:
        TrainingArguments(output_dir="out", torch_compile=True)  # this script has never succeeded

    Instead:
        TrainingArguments(output_dir="out")  # add torch_compile=True after it has succeeded

    """
    uses = facts.uses
    if uses.setting("torch_compile") is True and not facts.proven_script:
        yield Found(f"line {uses.line_of('torch_compile')} sets torch_compile=True")
    elif (call := uses.called("compile")) and call.name == "torch.compile" and not facts.proven_script:
        yield Found(f"line {call.line} calls torch.compile")
