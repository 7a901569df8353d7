import difflib
from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.static_eval import UNKNOWN


@rule(
    "PF-API-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Correct the argument.",
)
def settings_declared(facts: SubmitFacts) -> Iterator[Found]:
    """Arguments passed to a bundled trainer are declared settings with valid values.

    Why: a bundled trainer checks its own arguments, but only after the machine has been rented.

    Example:
        submit_job(script=sft, args=["--model", "Qwen/Qwen3-0.6B", "--dataset", "trl-lib/tldr", "--warmup-ratio=0.1"])

    Instead:
        submit_job(script=sft, args=["--model", "Qwen/Qwen3-0.6B", "--dataset", "trl-lib/tldr", "--warmup=0.1"])

    """
    typed = facts.uses.typed
    if typed is None:
        return
    for name in typed.unknown:
        near = difflib.get_close_matches(name, typed.declared, 1, 0.5)
        fix = f"Use {_flag(near[0])}, or leave it out." if near else "Leave it out; --help lists the settings."
        yield Found(f"{_flag(name)} is not a setting of this script", fix=fix)
    for name, value in typed.given.items():
        if name in typed.declared and value is not UNKNOWN and (problem := typed.declared[name].correction(value)):
            yield Found(f"{_flag(name)} is {value!r}, which the script does not accept", fix=problem)
    for name in typed.missing:
        yield Found(f"{_flag(name)} is missing, but the script requires it", fix=f"Add {_flag(name)}.")
    # An effective batch must be divisible into micro-batches and into groups of completions.
    values = {name: typed.given.get(name, setting.default) for name, setting in typed.declared.items()}
    batch = values.get("batch_size")
    for name in ("micro_batch", "generations"):
        part = values.get(name)
        if isinstance(batch, int) and isinstance(part, int) and part > 0 and batch % part:
            yield Found(
                f"--batch-size {batch} is not a multiple of {_flag(name)} {part}", fix=f"Choose a multiple of {part}."
            )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
