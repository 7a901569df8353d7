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
    """The platform currently offers the requested GPU, storage and kind of machine.

    Why: a free query shows immediately whether a platform offers the GPU, the kind of storage and interruptible
    instances, and whether they are available at the moment. Otherwise, the rental would fail after the inputs had been
    packed and a receipt had been issued. PF-COST-001 handles unknown prices.

    Example:
        submit_job(platform="lambda", gpu="gpu_8x_h100_sxm5")  # sold out in every region
        submit_job(platform="lambda", durable_storage=True)  # no region with a file system has that GPU

    Instead:
        submit_job(platform="lambda", gpu="gpu_1x_a10")  # offered in one region

    """
    if facts.unsold:
        yield Found(f"{facts.spec.platform} does not offer the requested machine: {facts.unsold}")
