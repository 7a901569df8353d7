from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLT-004",
    gate="submit",
    severity=Severity.ERROR,
    fix="Request hardware that the platform offers, or try another platform.",
)
def platform_has_it(facts: SubmitFacts) -> Iterator[Found]:
    """The platform offers the requested GPU, storage and kind of machine now.

    Why: a free query shows at once if a platform does not offer a GPU, a kind of storage or an interruptible instance,
    or if none is free at the moment. Otherwise the rental would fail, after the inputs were packed and a receipt was
    issued. PF-COST-001 handles an unknown price.

    Example:
        submit_job(platform="lambda", gpu="gpu_8x_h100_sxm5")  # sold out in every region
        submit_job(platform="lambda", durable_storage=True)  # no region with a file system has that GPU

    Instead:
        submit_job(platform="lambda", gpu="gpu_1x_a10")  # offered in one region

    """
    if facts.unsold:
        yield Found(f"{facts.spec.platform} does not offer the requested machine: {facts.unsold}")
