from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLT-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use another platform, or rehearse this one.",
)
def platform_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The platform can be used with gpuwarden.

    Why: gpuwarden has a backend for some platforms and only a profile for others. A profile contains the storage and
    billing rules, but you have to rent the instances in the console. A job for a platform without a backend is refused
    before the script is checked or a price is requested. The platform can still be rehearsed, with simulated instances
    and costs.

    Example:
        submit_job(platform="featurize", script=train)  # gpuwarden can't rent there

    Instead:
        submit_job(platform="rehearsal/featurize", script=train)
        submit_job(platform="ssh/box", script=train)  # "box" is an instance that was rented by hand

    """
    if facts.unusable:
        yield Found(f"gpuwarden can't run jobs on {facts.spec.platform}: {facts.unusable}")
