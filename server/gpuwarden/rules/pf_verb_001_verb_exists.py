from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-VERB-001", gate="submit", severity=Severity.ERROR, fix="Set teardown to a verb that the platform has.")
def verb_exists(facts: SubmitFacts) -> Iterator[Found]:
    """The intended teardown is one that the platform can do.

    Why: where a machine can't be stopped, a plan to stop it ends in a meter that runs on.
    """
    profile, verb = facts.profile, facts.spec.teardown
    if profile is not None and profile.meter.metered and getattr(profile.verbs, verb) is None:
        yield Found(f"{facts.spec.platform} has no {verb}")
