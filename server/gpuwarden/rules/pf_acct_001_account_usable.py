from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-ACCT-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Fix the account or its key in the provider's console.",
)
def account_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The account and its key are allowed to rent and release instances.

    Why: otherwise, a missing key, a key without permissions or an empty balance is detected only after all other
    preparation. A key that can launch an instance but not terminate it is the worst case, because the instance is then
    billed until you terminate it in the provider's console. Both permissions are checked before anything is rented.

    Example:
        submit_job(platform="lambda", gpu="gpu_1x_a10", script=train)  # the API key was revoked
        submit_job(platform="vastai", gpu="RTX 4090", script=train)  # the balance is empty

    Instead:
        submit_job(platform="lambda", gpu="gpu_1x_a10", script=train)  # the key may launch and terminate
        submit_job(platform="local", script=train)  # needs no account

    """
    yield from facts.reported("PF-ACCT-001")
