import re
from collections.abc import Iterator

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.hardware import gpu_of
from gpuwarden.core.models import Known
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_CURE = (
    "Choose a platform that has this GPU.",
    do(Action.LEAVE_OUT_ARGUMENT, "to use the machine's hardware", alternative=True, name="gpu"),
)


@rule("PF-PLACE-004", gate="submit", severity=Severity.ERROR, fix=_CURE)
def gpu_there(facts: SubmitFacts) -> Iterator[Found]:
    """An existing machine has the requested GPUs.

    Why: on a machine without the GPU, a trainer stops at its first CUDA call, or trains on the CPU for days. If the
    machine's GPUs can't be listed, the result is unknown. If a GPU's name is unknown, a mismatch is only a warning.

    Example:
        submit_job(platform="ssh/box", script=train, gpu="H100")  # the machine has one L4

    Instead:
        submit_job(platform="ssh/box", script=train, gpu="L4")

    """
    asked = facts.spec.gpu or ""
    if not isinstance(facts.readiness, Known) or not asked or asked.lower().startswith("cpu"):
        return
    if facts.readiness.value.where:
        return  # PF-ENG-005 checks an engine's GPUs
    names, wanted = facts.readiness.value.gpus, gpu_of(asked)
    if names is None:
        why = facts.readiness.value.gpus_why
        yield Found(f"it is unknown whether the machine has {asked}: {why}", severity=facts.could_not)
        return
    fit = [name for name in names if _is(name, asked)]
    count = wanted[1] * facts.spec.gpu_count if wanted else facts.spec.gpu_count
    if not names:
        yield Found(f"{asked} is requested, but the machine has no GPU")
    elif len(fit) < count:
        known = wanted is not None and all(gpu_of(name) for name in names)
        have = f"{len(fit)} of {count} {asked}" if fit else f"no {asked}"
        yield Found(f"the machine has {have}: {', '.join(names)}", severity=None if known else Severity.WARNING)


def _is(name: str, asked: str) -> bool:
    """Return true if the driver's name for a GPU matches the requested model, with any memory size."""
    found, wanted = gpu_of(name), gpu_of(asked)
    if found and wanted:
        return found[0].name.partition("-")[0] == wanted[0].name.partition("-")[0]
    plain = [re.sub(r"[^a-z0-9]", "", text.lower()) for text in (asked, name)]
    return plain[0] in plain[1]
