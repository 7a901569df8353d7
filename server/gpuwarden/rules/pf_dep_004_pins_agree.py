from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-DEP-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Choose compatible releases, or remove one of the version constraints.",
)
def pins_agree(facts: SubmitFacts) -> Iterator[Found]:
    """The version constraints in the header allow compatible releases.

    Why: if every allowed release of one package excludes every allowed release of another, the resolver fails, but only
    after the machine has been rented. The requirements are read from the wheels' metadata, for one release of each
    minor version.

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
            f"{found.package} requires {found.other}{found.asked}, but the header allows {found.other}{found.given}"
        )
        yield Found(message)
