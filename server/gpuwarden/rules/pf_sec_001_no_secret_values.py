from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SEC-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Take the value out, name its variable in secrets, and revoke it if it was shown to anybody.",
)
def no_secret_values(facts: SubmitFacts) -> Iterator[Found]:
    """No secret's value stands in the command, the script or the environment.

    Why: arguments are visible to every process of the machine, and specs are kept. Secrets travel by name only;
    their values come from the user's environment and reach the job through a pipe.
    """
    for leak in facts.leaks:
        yield Found(f"{leak.where} holds what looks like {leak.looks_like}")
