from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import TeardownFacts


@rule("TD-VERB-001", gate="teardown", severity=Severity.ERROR, fix="Ask for the other verb.")
def verb_exists(facts: TeardownFacts) -> Iterator[Found]:
    """The platform has the verb.

    Why: on a machine without a stop, a shutdown from inside leaves the meter running.
    """
    if getattr(facts.profile.verbs, facts.verb) is None:
        yield Found(f"{facts.profile.title} has no {facts.verb}")
