from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.core.sanitize import quoted
from gpuwarden.rules.facts import SubmitFacts


@rule(
    "PF-REL-005",
    gate="submit",
    severity=Severity.ERROR,
    fix="Fix the script at that line, and rehearse it again.",
)
def rehearsal_passed(facts: SubmitFacts) -> Iterator[Found]:
    """The script's rehearsal found no fault.

    Why: a script that fails in the first minute on this machine also fails in the first minute on a rented machine. An
    error that the rehearsal's substitutes can't have caused closes the gate. Any other error is a warning, because the
    small substitute model or the small number of rows may be the cause.

    Example:
        Trainer(model=model, args=args, tokenizer=tokenizer)

    Instead:
        Trainer(model=model, args=args, processing_class=tokenizer)

    """
    found = facts.rehearsed
    if found is None or found.outcome != "fault":
        return
    where = f" at line {found.line}" if found.line else ""
    severity = Severity.ERROR if found.certain else Severity.WARNING
    yield Found(f"the rehearsal failed{where}: {quoted(found.message, 400)}", severity=severity)
