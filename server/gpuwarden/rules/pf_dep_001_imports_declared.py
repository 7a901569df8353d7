from collections.abc import Iterator

from gpuwarden.core.processes import installed
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.training import canonical_name, closure, distributions, read_requirement
from gpuwarden.rules.facts import SubmitFacts


@rule("PF-DEP-001", gate="submit", severity=Severity.ERROR, fix="Add it to dependencies in the script's header.")
def imports_declared(facts: SubmitFacts) -> Iterator[Found]:
    """Every third-party import has an entry in the script's header.

    Why: `uv run` gives the script what its header lists and nothing else. An import that comes along with another
    package today is a warning: it may stop coming along.
    """
    script = facts.script
    if script is None or script.error or script.header is None or not script.header.dependencies:
        return  # PF-SRC-001 and PF-SRC-002 speak of these
    listed = {r.name for d in script.header.dependencies if (r := read_requirement(d))}
    urls = any(read_requirement(d) is None for d in script.header.dependencies)
    listed |= {canonical_name(n.partition("=")[0].partition("[")[0]) for n in installed(script.uses.shells, "pip")}
    there = closure(listed)
    for module in script.third_party:
        names = distributions(module)
        if any(n in listed for n in names) or (urls and len(listed) < len(script.header.dependencies)):
            continue
        if any(n in there for n in names):
            message = f"{module} is imported and comes only with another package; {names[0]} is not listed"
            yield Found(message, severity=Severity.INFO)
        else:
            yield Found(f"{module} is imported, and dependencies lists no {' or '.join(names)}")
