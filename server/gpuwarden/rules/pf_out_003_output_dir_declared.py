from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-OUT-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Add the script's output_dir to outputs.",
)
def output_dir_declared(facts: SubmitFacts) -> Iterator[Found]:
    """The trainer's output folder is among the outputs.

    Why: only declared outputs are pulled, verified and protected. If the script never writes to the declared folder,
    its results are not protected.

    Example:
        submit_job(script='TrainingArguments(output_dir="checkpoints")', outputs=["out"])

    Instead:
        submit_job(script='TrainingArguments(output_dir="out")', outputs=["out"])

    """
    folder = facts.uses.setting("output_dir")
    if not isinstance(folder, str) or not facts.spec.outputs or facts.uses.pushes:
        return
    path = PurePosixPath(folder)
    declared = [PurePosixPath(o) for o in facts.spec.outputs]
    if not any(path.is_relative_to(d) or d.is_relative_to(path) for d in declared):
        listed, line = ", ".join(facts.spec.outputs), facts.uses.line_of("output_dir")
        yield Found(
            f"{f'line {line}' if line else 'the command line'} writes to {folder}; the declared outputs are {listed}",
            fix=f"Add {folder}.",
            # A bundled trainer writes nowhere else, so none of its files would be kept.
            severity=Severity.ERROR if facts.uses.typed is not None and facts.metered else None,
        )
