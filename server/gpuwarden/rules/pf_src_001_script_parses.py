from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-SRC-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Fix the syntax error.",
)
def script_parses(facts: SubmitFacts) -> Iterator[Found]:
    """The script is valid Python with a valid header.

    Why: a typing error costs nothing here and a rental there. The script is parsed, never executed, and its PEP 723
    header is read as TOML. A script that can't be parsed also hides everything else: its imports, its repos and its
    outputs are unknown, so the other rules about scripts have nothing to check.

    Example:
        submit_job(script="def train(:")
        submit_job(script="for i in range(3) print(i)")

    Instead:
        submit_job(script="def train(): ...")
        submit_job(script="for i in range(3): print(i)")

    """
    if facts.script is not None and facts.script.error:
        yield Found(facts.script.error)
