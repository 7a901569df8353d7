from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-PLT-004", gate="submit", severity=Severity.ERROR, fix="Ask for what the platform has, or try another one.")
def platform_has_it(facts: SubmitFacts) -> Iterator[Found]:
    """The platform rents what is asked: this GPU, this storage, this kind of machine, now.

    Why: asked for its price, a platform says so at once and for nothing. That is no unknown price.
    """
    if facts.unsold:
        yield Found(f"{facts.spec.platform} does not rent that: {facts.unsold}")
