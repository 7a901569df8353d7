from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-OUT-001",
    gate="teardown",
    severity=Severity.WARNING,
    fix="Search for it under another name before you approve.",
)
def outputs_exist(facts: TeardownFacts) -> Iterator[Found]:
    """Every declared output exists.

    Why: results that a job saved to an undeclared path are neither copied nor verified. The teardown would destroy
    these results without any other warning, so search for them before you approve it.

    Example:
        teardown_request(job_id="j1", verb="terminate")  # outputs are ["out", "logs"], and logs does not exist

    Instead:
        teardown_request(job_id="j1", verb="terminate")  # out and logs both exist

    """
    if facts.gone:
        return
    for output in facts.missing:
        yield Found(f"the declared output {output} does not exist on the machine")
