from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.ecosystem_tables import GIVEN_VARIABLES, REPORT_VARIABLES, RUNNER_VARIABLES


@rule(
    "PF-ENV-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Pass the variable in env, list it in secrets, or read it with a default.",
)
def variables_set(facts: SubmitFacts) -> Iterator[Found]:
    """Variables that the script requires are passed to it.

    Why: `os.environ["X"]` raises KeyError if X is not set. A new machine does not have your shell's environment.

    Example:
        rank = os.environ["LORA_RANK"]  # submit_job(env={})

    Instead:
        rank = os.environ.get("LORA_RANK", "16")

    """
    own = {*facts.spec.env, *facts.spec.secrets}
    given = own | GIVEN_VARIABLES
    run_by_us = facts.profile is None or facts.profile.runner
    if run_by_us:
        given |= RUNNER_VARIABLES
    here = facts.spec.platform.partition("/")[0] in {"local", "rehearsal"}
    if facts.policy.local.network if here else run_by_us:  # a job without network access can't send reports
        given |= {name for address, key in REPORT_VARIABLES.items() if address not in own for name in (address, key)}
    named: dict[str, int] = {}
    for read in facts.uses.env:
        if read.required and read.name not in given:
            named.setdefault(read.name, read.line)
    for name, line in sorted(named.items()):
        yield Found(f"line {line} needs the variable {name}, which is neither in env nor in secrets")
