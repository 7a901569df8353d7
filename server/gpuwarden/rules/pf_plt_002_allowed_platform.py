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

    Why: the user who pays decides where money may be spent. The policy file belongs to the user and can't be changed by
    a job, by a tool call or by instructions in a document that an agent reads. The policy may contain patterns such as
    `vast*`.

    Example:
        submit_job(platform="runpod", script=train)  # policy: platforms = ["local", "ssh/*"]
        submit_job(platform="vastai", script=train)  # policy: platforms = []

    Instead:
        submit_job(platform="ssh/box", script=train)  # policy: platforms = ["local", "ssh/*"]
        submit_job(platform="vastai", script=train)  # policy: platforms = ["vast*"]

    """
    if not facts.policy.allows(facts.spec.platform):
        allowed = ", ".join(facts.policy.platforms) or "none"
        yield Found(f"the policy does not allow {facts.spec.platform}; it allows {allowed}")
