from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLT-004",
    gate="submit",
    severity=Severity.ERROR,
    fix="Ask for what the platform has, or try another one.",
)
def platform_has_it(facts: SubmitFacts) -> Iterator[Found]:
    """The platform rents what is asked: this GPU, this storage, this kind of machine, now.

    Why: a platform says at once and for nothing that it does not offer a GPU, a kind of storage or an interruptible
    instance, or that none is free at the moment. Renting would fail in the same way, after the inputs were packed
    and a receipt was issued. This is different from an unknown price, which PF-COST-001 handles.

    Example:
        submit_job(platform="lambda", gpu="gpu_8x_h100_sxm5")  # sold out in every region
        submit_job(platform="lambda", durable_storage=True)  # no region with a file system has that GPU

    Instead:
        submit_job(platform="lambda", gpu="gpu_1x_a10")  # offered in one region

    """
    if facts.unsold:
        yield Found(f"{facts.spec.platform} does not rent that: {facts.unsold}")
