from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule(
    "TD-VERB-002",
    gate="teardown",
    severity=Severity.WARNING,
    fix="Terminate instead, once all outputs are safe.",
)
def meter_stops(facts: TeardownFacts) -> Iterator[Found]:
    """The requested verb ends all billing.

    Why: on most platforms, a stopped machine's disk is billed until the machine is terminated.

    Example:
        teardown_request(job_id="j1", verb="stop")  # the disk is still billed

    Instead:
        teardown_request(job_id="j1", verb="terminate")

    """
    meter = facts.profile.meter
    if facts.verb not in meter.stops_on:
        yield Found(f"{facts.verb} does not stop billing on {facts.profile.title}", severity=Severity.ERROR)
    elif names := facts.profile.residue(facts.verb, requested=facts.durable_storage):
        delete = "Delete it in the platform's console once you no longer need its contents."
        yield Found(
            f"{' and '.join(names)} is still billed after {facts.verb} on {facts.profile.title}: "
            f"{meter.note or 'see its profile'}",
            delete if facts.verb == "terminate" else "",
        )
