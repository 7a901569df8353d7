from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.ecosystem_tables import GONE_NAMES, read_requirement


@rule(
    "PF-API-002",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use what replaced it.",
)
def names_exist(facts: SubmitFacts) -> Iterator[Found]:
    """Names that the script imports exist in the versions that the header asks for.

    Why: PPO and others left trl; the import fails in the first second, after the rental.

    Example:
        # dependencies = ["trl>=1.16"]
        from trl import PPOTrainer

    Instead:
        # dependencies = ["trl>=1.16"]
        from trl import GRPOTrainer

    """
    header = facts.script.header if facts.script and not facts.script.error else None
    wanted = [r for d in (header.dependencies if header else ()) if (r := read_requirement(d))]
    used = dict(reversed(facts.uses.imports)) | {c.name: c.line for c in facts.uses.calls if c.name in GONE_NAMES}
    for name, line in sorted(used.items(), key=lambda x: x[1]):
        gone = GONE_NAMES.get(name)
        if gone and not any(r.name == gone.package and r.surely_below(gone.since) for r in wanted):
            yield Found(f"line {line}: {name} is gone since {gone.package} {gone.since}", fix=f"Use {gone.instead}.")
