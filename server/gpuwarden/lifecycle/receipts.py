"""Launch a job or a fan-out from its receipt alone, with the arguments recorded when the receipt was issued."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.launching import FanOutResult
from gpuwarden.lifecycle.records import read_receipt, receipt_used
from gpuwarden.lifecycle.submission.bundling import script_file
from gpuwarden.lifecycle.submission.submit import ANOTHER_RECEIPT, Submission, submit


async def launch_receipt(ctx: Context, receipt: str, given: Mapping[str, Any]) -> Submission | FanOutResult:
    """Launch a receipt's job or fan-out, after checking all facts again.

    `given` contains the arguments passed with the receipt; they must match the recorded arguments. Raises Conflict if
    they differ or if the script file has changed, and the same errors as `submit`.
    """
    issued = read_receipt(ctx.ledger, receipt).issued
    base = issued.plan.base if issued.plan is not None else issued.spec
    if base is None:
        raise Conflict(
            "the receipt has no recorded arguments; it approves a price or limits, or was issued by an older version",
            do(Action.SUBMIT, "with all arguments, to get a new receipt", receipt=""),
        )
    more = {name: value for name, value in given.items() if value and value != JobSpec.model_fields[name].default}
    if build(JobSpec, base.model_dump() | more) != base:
        raise Conflict("the receipt was issued for other arguments", ANOTHER_RECEIPT)
    if issued.script_file and not receipt_used(ctx.ledger, receipt):
        try:
            changed = script_file(ctx.cwd or Path.cwd(), issued.script_file) != base.script
        except BadRequest as gone:
            raise Conflict(f"the checked script can't be read again: {gone.message}", ANOTHER_RECEIPT) from gone
        if changed:
            name = line(issued.script_file)
            raise Conflict(f"the script {name} has changed since the receipt was issued", ANOTHER_RECEIPT)
    if issued.plan is not None:
        return await fan_out(ctx, issued.plan, receipt=receipt)
    return await submit(ctx, base, receipt=receipt)
