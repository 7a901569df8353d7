"""Run the read-only checks from decision lists on the machine of a job that has problems."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwarden.backends.base import CommandBackend
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import CommandOutput, Frozen
from gpuwarden.knowledge.decisions import Check, DecisionList
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord

MAX_CHECKS = 8
UNKNOWN = "unknown"


class CheckOutcome(Frozen):
    """The outcome of one check on the job's machine, with the ids of the decision list, the check and the outcome.

    If the command returned no result, `outcome` is `unknown` and `why` is the reason. `value` is the number that
    determined the outcome.
    """

    list: str
    check: str
    outcome: str
    means: str = ""
    see: tuple[str, ...] = ()
    value: float | None = None
    why: str = ""


async def outcomes(ctx: Context, job: JobRecord, lists: Sequence[DecisionList]) -> tuple[CheckOutcome, ...]:
    """Run all read-only checks from the lists in one call, and evaluate their outputs. Each command runs only once."""
    rows = [(one.id, check) for one in lists for check in one.checks if check.reads][:MAX_CHECKS]
    if not rows or job.handle is None or not isinstance(backend := ctx.backend(job.handle.backend), CommandBackend):
        return ()
    commands = {" ".join(check.command): check.command for _, check in rows}
    try:
        printed = await backend.look(job.handle, commands)
    except WardenError as error:
        return tuple(_outcome(name, check, CommandOutput(why=error.code)) for name, check in rows)
    return tuple(_outcome(name, check, printed[" ".join(check.command)]) for name, check in rows)


def _outcome(name: str, check: Check, printed: CommandOutput) -> CheckOutcome:
    if printed.exit is None:
        return CheckOutcome(list=name, check=check.id, outcome=UNKNOWN, why=printed.why)
    found, value = check.judge(printed.text, printed.exit)
    if found is None:
        return CheckOutcome(list=name, check=check.id, outcome=UNKNOWN, why=f"exit {printed.exit}")
    return CheckOutcome(
        list=name, check=check.id, outcome=found.id, means=found.means, see=found.see, value=value
    )  # fmt: skip
