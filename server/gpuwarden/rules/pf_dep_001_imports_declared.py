from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import (
    KNOWN,
    closure,
    distributions,
    listed,
    read_requirement,
)
from gpuwarden.static_analysis.env_and_shell import installed


@rule(
    "PF-DEP-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add the package to dependencies in the script's header.",
)
def imports_declared(facts: SubmitFacts) -> Iterator[Found]:
    """Every third-party import has an entry in the script's header.

    Why: `uv run` installs only the packages that the header lists and their dependencies. An imported package that is
    installed only as a dependency of another package is reported too, because the other package may drop the
    dependency.

    Example:
        # dependencies = ["torch>=2.8"]
        import peft

    Instead:
        # dependencies = ["torch>=2.8", "peft>=0.18"]
        import peft

    """
    script = facts.script
    if script is None or script.error or script.header is None or not script.header.dependencies:
        return  # PF-SRC-001 and PF-SRC-002 report these
    names = script.header.dependencies
    direct = listed(names, installed(script.uses.shells, "pip"))
    if any(read_requirement(d) is None for d in names):
        return  # a requirement that is only a URL may install any package
    there = closure(direct)
    strange = direct - KNOWN  # packages and extras whose dependencies are unknown
    severity = Severity.WARNING if strange else None
    for module in facts.undeclared:
        packages = distributions(module)
        if direct & set(packages):
            continue
        if there & set(packages):
            message = f"{module} is imported, but is only a dependency of another package; {packages[0]} is not listed"
            yield Found(message, severity=Severity.INFO)
        else:
            message = f"{module} is imported, but the header does not list {' or '.join(packages)}"
            yield Found(message, severity=severity)
