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

    Why: on some platforms, instances can be terminated but not stopped. A shutdown from inside such a
    machine ends the operating system, but the machine is still billed, so a shutdown never replaces a missing stop.

    Example:
        teardown_request(job_id="j1", verb="stop")  # the platform can only terminate

    Instead:
        teardown_request(job_id="j1", verb="terminate")

    """
    if getattr(facts.profile.verbs, facts.verb) is None:
        yield Found(f"{facts.profile.title} has no {facts.verb}")
