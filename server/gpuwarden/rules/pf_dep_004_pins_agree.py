from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-DEP-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Choose releases that go together, or leave one of them without a condition.",
)
def pins_agree(facts: SubmitFacts) -> Iterator[Found]:
    """The conditions of the header allow releases that accept each other.

    Why: a resolver ends with an error where every allowed release of one package refuses every allowed release of
    another, after the machine was rented. What a release asks for comes from the metadata of its wheel, of one release
    for each minor version.

    Example:
        # dependencies = ["trl==1.16.0", "transformers==4.46.3"]

    Instead:
        # dependencies = ["trl==1.16.0", "transformers>=5"]

    """
    header = facts.script.header if facts.script and not facts.script.error else None
    if not header:
        return
    from gpuwarden.static_analysis.signatures.releases import conflicts

    for found in conflicts(header.dependencies):
        message = (
            f"{found.package} asks for {found.other}{found.asked}, and the header allows {found.other}{found.given}"
        )
        yield Found(message)
