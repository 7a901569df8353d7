from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Ask the user to set it in the environment that gpuwarden runs in.",
)
def secrets_set(facts: SubmitFacts) -> Iterator[Found]:
    """Every named secret has a value.

    Why: a job that can't log in fails after the machine was rented.
    """
    for name in facts.unset_secrets:
        yield Found(f"the secret {name} is named, but has no value here")
