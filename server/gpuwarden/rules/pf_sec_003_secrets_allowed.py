from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-003",
    gate="submit",
    severity=Severity.ERROR,
    fix="Leave it out, or ask the user to add its name to allowed in the policy's [secrets].",
)
def secrets_allowed(facts: SubmitFacts) -> Iterator[Found]:
    """The user's policy allows every named secret, and none is an account key.

    Why: a job can send its secrets anywhere. An account key can rent and terminate any machine in the account without
    passing the gates, so no policy can allow it.

    Example:
        submit_job(secrets=["VAST_API_KEY"], script=train)  # can rent and terminate any machine

    Instead:
        submit_job(secrets=["HF_TOKEN"], script=train)  # allowed by the policy's [secrets]

    """
    for name in facts.spec.secrets:
        if name in facts.account_secrets:
            yield Found(
                f"{name} is, or contains, an account key that can rent and terminate machines; jobs never receive it",
                "Leave it out; only gpuwarden uses it, on this machine.",
            )
        elif not facts.policy.secrets.allows(name):
            yield Found(f"the user's policy does not allow the secret {name} for jobs")
