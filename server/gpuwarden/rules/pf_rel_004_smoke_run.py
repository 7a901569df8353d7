from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

# For each method, a model and a dataset that its trainer accepts without changes.
_PAIRS = ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/ultrafeedback_binarized")
_PROMPTS = ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K")
_KNOWN_GOOD = {
    "sft": ("Qwen/Qwen2.5-0.5B", "trl-lib/Capybara"),
    "dpo": _PAIRS,
    "orpo": _PAIRS,
    "cpo": _PAIRS,
    "reward": _PAIRS,
    "kto": ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/kto-mix-14k"),
    "grpo": _PROMPTS,
    "rloo": _PROMPTS,
    "detection": ("PekingU/rtdetr_v2_r18vd", "cppe-5"),
    "classification": ("google/vit-base-patch16-224", "ethz/food101"),
}


@rule(
    "PF-REL-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Run the script once for a few minutes on known inputs.",
)
def smoke_run(facts: SubmitFacts) -> Iterator[Found]:
    """A new script has run once on inputs that are known to work.

    Why: if a proven script fails, the cause is in the inputs; if a new script fails, the cause may be anywhere.
    gpuwarden's bundled trainers count as proven if they are unchanged, because gpuwarden's tests run each of them to
    completion. A script whose first step was rehearsed on this machine with the same arguments also counts as proven.

    Example:
        submit_job(gpu="h100", script=new_script, timeout_s=36_000)

    Instead:
        submit_job(gpu="h100", script=new_script_with_max_steps_20, timeout_s=1200)

    """
    spec = facts.spec
    if spec.script is None or facts.proven_script or not facts.metered or not facts.uses.trainers:
        return
    if facts.rehearsed is not None and facts.rehearsed.outcome == "passed":
        return
    if (spec.timeout_s or 0) <= 1800 and isinstance(facts.uses.setting("max_steps"), int):
        return  # this is the smoke run
    known = [_KNOWN_GOOD.get(method) for method in facts.uses.methods]
    inputs = ""  # if the script reads columns, the known data may lack them
    if len(known) == 1 and known[0] is not None and not (facts.uses.reads or facts.uses.row_functions):
        inputs = f"model {known[0][0]}, data {known[0][1]}, "
    smoke = f"submit it with {inputs}max_steps=20, a timeout of 1200 s and the same outputs."
    rehearse = do(Action.REHEARSE, "to run its first step here")
    fix = (f"First {smoke}",) if facts.rehearsed is not None else (rehearse, f"Or first {smoke}")
    yield Found("this script has not succeeded here before", fix=fix)
