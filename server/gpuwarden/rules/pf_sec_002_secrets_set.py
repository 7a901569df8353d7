from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Ask the user to set the variable in gpuwarden's environment.",
)
def secrets_set(facts: SubmitFacts) -> Iterator[Found]:
    """Every named secret has a value.

    Why: a job that can't log in fails after the machine has been rented, and often late: at the first push, or when a
    gated model is downloaded. Only a secret's name is part of a job. Its value is read from gpuwarden's own environment
    at launch, so it must be set there, not in the caller's shell.

    Example:
        submit_job(secrets=["HF_TOKEN"], script=train)  # HF_TOKEN is not set where gpuwarden runs

    Instead:
        submit_job(secrets=["HF_TOKEN"], script=train)  # it is set
        submit_job(script=train)  # a job that needs no secret names none

    """
    for name in facts.unset_secrets:
        yield Found(f"the secret {name} has no value in gpuwarden's environment")
