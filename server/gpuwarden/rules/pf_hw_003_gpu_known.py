from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HW-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Use the platform's name for the GPU; its profile lists the names.",
)
def gpu_known(facts: SubmitFacts) -> Iterator[Found]:
    """The requested GPU is in the table of known GPUs.

    Why: memory and precision can't be checked for a GPU that is not in the table. The job is not refused, because
    platforms offer new GPUs before the table lists them. The quote shows whether the platform offers the GPU.

    Example:
        submit_job(gpu="fast-one")

    Instead:
        submit_job(gpu="a100-large")
        submit_job()  # a job without a GPU passes, too

    """
    word = facts.spec.gpu
    if word and facts.gpu is None and "cpu" not in word.lower():
        yield Found(f"{word!r} is not in the table of known GPUs, so its memory and features were not checked")
