from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HW-003",
    gate="submit",
    severity=Severity.WARNING,
    fix="Name the GPU as the platform does; its profile lists the words.",
)
def gpu_known(facts: SubmitFacts) -> Iterator[Found]:
    """The GPU that is asked for is in the table of known GPUs.

    Why: nothing about memory or precision can be checked for a name that has no entry in the table of GPUs. The job
    is not refused, because platforms add new GPUs faster than tables do. Whether the platform offers it is decided
    by its quote.

    Example:
        submit_job(gpu="fast-one")

    Instead:
        submit_job(gpu="a100-large")
        submit_job()  # a job without a GPU passes, too

    """
    word = facts.spec.gpu
    if word and facts.gpu is None and "cpu" not in word.lower():
        yield Found(f"{word!r} is not in the table of known GPUs, so what fits on it was not checked")
