import posixpath
from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-IN-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add the folder to inputs, or correct the path.",
)
def loaded_folders_exist(facts: SubmitFacts) -> Iterator[Found]:
    """A folder from which the script loads a model or a dataset is among the inputs or created by the script.

    Why: the working folder on a rented machine contains only the inputs. A path such as `./model` is never looked up on
    the Hub, so loading it fails after the machine has been rented. If other code may create the folder, the finding is
    a warning.

    Example:
        AutoModelForCausalLM.from_pretrained("./my-modle")

    Instead:
        snapshot_download("Qwen/Qwen3-0.6B", local_dir="my-model")
        AutoModelForCausalLM.from_pretrained("./my-model")

    """
    uses = facts.uses
    if not facts.metered:
        return
    there = {PurePosixPath(posixpath.normpath(path)) for path in (*facts.spec.outputs, *(f.path for f in facts.inputs))}
    other = bool(uses.unseen or uses.shells) or any(w.path is None and not w.maybe for w in uses.writes)
    for call in uses.opened:
        path = str(call.get("pretrained_model_name_or_path", 0))
        folder = PurePosixPath(posixpath.normpath(path))
        if not any(p.is_relative_to(folder) or folder.is_relative_to(p) for p in there):
            severity = Severity.WARNING if other or not call.certain else None
            yield Found(f"line {call.line} loads {path}, which is not among the inputs", severity=severity)
