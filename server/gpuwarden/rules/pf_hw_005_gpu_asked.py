from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-HW-005",
    gate="submit",
    severity=Severity.WARNING,
    fix="Request a GPU, such as t4-small or a10g-small.",
)
def gpu_asked(facts: SubmitFacts) -> Iterator[Found]:
    """A job that trains a model requests a GPU.

    Why: a serverless platform runs a job without a hardware request on a CPU, and the trainer then runs for days at a
    price that looks low, until the timeout ends it without a trained model. Scripts that only download or convert don't
    need a GPU and get no warning.

    Example:
        submit_job(platform="hf-jobs", script=train)  # no gpu: the platform gives a CPU

    Instead:
        submit_job(platform="hf-jobs", script=train, gpu="a10g-small")

    """
    gpu, profile = facts.spec.gpu, facts.profile
    nothing = (not gpu and profile is not None and profile.kind == "serverless") or (gpu or "").lower().startswith(
        "cpu"
    )
    if nothing and (facts.uses.trainers or facts.uses.methods):
        yield Found(f"the job trains a model on {gpu or 'the default hardware'}, which has no GPU")
