from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-PLT-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use an allowed platform, or ask the user to add this one to `platforms` in the policy.",
)
def allowed_platform(facts: SubmitFacts) -> Iterator[Found]:
    """The user's policy allows the platform.

    Why: the person who pays decides where money may be spent.
    """
    if not facts.policy.allows(facts.spec.platform):
        allowed = ", ".join(facts.policy.platforms) or "none"
        yield Found(f"the policy does not allow {facts.spec.platform}; it allows {allowed}")
