from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import canonical_name, read_requirement

# Packages whose interface changed incompatibly within the last year.
_MOVING = frozenset({"transformers", "trl", "peft", "accelerate", "datasets", "torch", "unsloth", "diffusers", "vllm"})


@rule(
    "PF-DEP-002",
    gate="submit",
    severity=Severity.WARNING,
    fix="Add a minimum version, such as trl>=1.16.",
)
def versions_bounded(facts: SubmitFacts) -> Iterator[Found]:
    """The header constrains the version of each training library.

    Why: without a constraint, the job gets the newest release available when it runs. A new major version may rename
    arguments, so that a script that worked the day before fails.

    Example:
        # dependencies = ["trl"]

    Instead:
        # dependencies = ["trl>=1.16"]

    """
    header = facts.script.header if facts.script and not facts.script.error else None
    wanted = [r for d in (header.dependencies if header else ()) if (r := read_requirement(d))]
    free = {canonical_name(r.name) for r in wanted if not r.specifier and not r.url}
    loose = sorted(free & _MOVING)
    if loose:
        yield Found(f"the header specifies no version for {', '.join(loose)}")
