from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule("TD-JOB-002", gate="teardown", severity=Severity.ERROR, fix="Finish those jobs first.")
def machine_not_shared(facts: TeardownFacts) -> Iterator[Found]:
    """No other job lives on the machine.

    Why: one job's teardown would be another one's loss.
    """
    for job in facts.other_jobs:
        yield Found(f"job {job} uses the same instance")
