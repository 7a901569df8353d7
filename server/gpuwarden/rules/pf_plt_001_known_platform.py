from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-PLT-001", gate="submit", severity=Severity.ERROR, fix="Name one of the platforms that have a profile.")
def known_platform(facts: SubmitFacts) -> Iterator[Found]:
    """The platform has a profile.

    Why: without a profile nobody knows what a stop destroys or what keeps billing, so nothing can be promised.
    """
    if facts.profile is None:
        yield Found(f"there is no platform {facts.spec.platform!r}; there are {', '.join(facts.platforms)}")
