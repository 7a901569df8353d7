from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-ACCT-001", gate="submit", severity=Severity.ERROR, fix="Correct the account or its key with the provider.")
def account_usable(facts: SubmitFacts) -> Iterator[Found]:
    """The account can rent, and its key may.

    Why: a missing key, a key without the right or an empty balance is found out after everything else was prepared,
    and a key that can rent but not release leaves a meter running.
    """
    yield from facts.told("PF-ACCT-001")
