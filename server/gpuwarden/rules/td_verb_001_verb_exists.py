from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-VERB-001",
    gate="teardown",
    severity=Severity.ERROR,
    fix="Request the other verb.",
)
def verb_exists(facts: TeardownFacts) -> Iterator[Found]:
    """The platform supports the requested verb.

    Why: on some platforms, instances can be terminated but not stopped. A shutdown from inside such a machine only
    halts the operating system, and the machine is still billed, so it can't replace a stop.

    Example:
        teardown_request(job_id="j1", verb="stop")  # the platform can only terminate

    Instead:
        teardown_request(job_id="j1", verb="terminate")

    """
    if getattr(facts.profile.verbs, facts.verb) is None:
        yield Found(f"{facts.profile.title} does not support {facts.verb}")
