from collections.abc import Iterator

from gpuwarden.core.models import Known
from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.newer_grammar import described
from gpuwarden.static_analysis.script import with_grammar


@rule(
    "PF-SRC-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Fix the syntax error.",
)
def script_parses(facts: SubmitFacts) -> Iterator[Found]:
    """The script is valid Python with a valid header.

    Why: a syntax error costs nothing if it is found here, but a rented machine is billed until the job fails. The
    script is parsed, never executed, and its PEP 723 header is read as TOML. If a script can't be parsed, its imports,
    repos and outputs are unknown, so the other rules about scripts can't check it. The rule uses the grammar of the
    Python versions that the header allows, not that of the Python that runs gpuwarden. A script that no allowed version
    can parse is an error. A script that only later versions can parse is a warning, unless the machine has such a
    version. If the header requires a Python version that gpuwarden does not know, a syntax error is a warning.

    Example:
        submit_job(script="def train(:")
        submit_job(script="for i in range(3) print(i)")

    Instead:
        submit_job(script="def train(): ...")
        submit_job(script="for i in range(3): print(i)")

    """
    if facts.script is None:
        return
    header, grammar = facts.script.header, facts.script.grammar
    if facts.script.error:
        cure = "Rewrite it for the Python that the header requires, or require a later version." if grammar else ""
        yield Found(facts.script.error, cure, Severity.WARNING if facts.script.newer else None)
        return
    chosen = isinstance(facts.readiness, Known) and facts.readiness.value.python and facts.spec.script is not None
    if grammar is not None and with_grammar(header, grammar) != header and not chosen:
        asked = header.requires_python if header else None
        why = f"requires-python {asked!r} allows earlier versions" if asked else "the header does not require it"
        fix = 'Write requires-python = ">={}.{}" in the header.'.format(*grammar.version)
        yield Found(f"{described(grammar)}, and {why}", fix, Severity.WARNING)
