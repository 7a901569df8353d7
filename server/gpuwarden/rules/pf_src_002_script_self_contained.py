from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SRC-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Add a `# /// script` header with requires-python and dependencies (PEP 723).",
)
def script_self_contained(facts: SubmitFacts) -> Iterator[Found]:
    """A script that imports third-party packages declares them in a PEP 723 header.

    Why: a new machine has none of these packages, and an image's contents may change at any time.

    Example:
        import torch

    Instead:
        # /// script
        # requires-python = ">=3.11"
        # dependencies = ["torch>=2.8"]
        # ///
        import torch

    """
    script = facts.script
    imported = ", ".join(facts.undeclared)
    if script is None or script.error or not imported:
        return
    if script.header is None:
        yield Found(f"the script imports {imported}, but has no header that declares them")
    elif not script.header.dependencies:
        yield Found(f"the script imports {imported}, but its header declares no dependencies")
