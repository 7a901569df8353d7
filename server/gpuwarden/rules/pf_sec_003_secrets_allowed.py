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
    """Every named secret is allowed by the user, and none is the key of an account.

    Why: a job can send what it is given anywhere. Whoever has the key of an account can rent and destroy every
    machine of it, past both gates, so no policy can allow that one.

    Example:
        submit_job(secrets=["VAST_API_KEY"], script=train)  # rents and destroys every machine

    Instead:
        submit_job(secrets=["HF_TOKEN"], script=train)  # allowed by the policy's [secrets]

    """
    for name in facts.spec.secrets:
        if name in facts.account_secrets:
            yield Found(
                f"{name} is, or contains, a key that rents and ends machines; jobs never receive it",
                "Leave it out; gpuwarden itself uses it, on this side.",
            )
        elif not facts.policy.secrets.allows(name):
            yield Found(f"the user's policy does not let a job have the secret {name}")
