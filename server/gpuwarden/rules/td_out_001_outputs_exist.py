from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-OUT-001", gate="teardown", severity=Severity.WARNING, fix="Look for it under another name before you say yes."
)
def outputs_exist(facts: TeardownFacts) -> Iterator[Found]:
    """Every declared output exists.

    Why: a job that saved elsewhere than it said leaves its results in files that nobody protects.
    """
    if facts.gone:
        return
    for output in facts.missing:
        yield Found(f"the declared output {output} does not exist on the machine")
