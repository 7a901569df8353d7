from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-PLT-003", gate="submit", severity=Severity.ERROR, fix="Use another platform, or rehearse this one.")
def platform_usable(facts: SubmitFacts) -> Iterator[Found]:
    """Jobs can be run on the platform from here.

    Why: better to hear it now than after everything else was prepared.
    """
    if facts.unusable:
        yield Found(f"jobs can't be run on {facts.spec.platform} from here: {facts.unusable}")
