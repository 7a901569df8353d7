"""Launch by the receipt alone: its arguments were recorded when they were checked, so that they travel once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.sanitize import line
from gpuwarden.ledger.events import ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.launching import FanOutResult
from gpuwarden.lifecycle.records import read_receipt, receipt_used
from gpuwarden.lifecycle.submission.inputs import script_in
from gpuwarden.lifecycle.submission.submit import ANOTHER_RECEIPT, Submission, submit


async def launch_receipt(ctx: Context, receipt: str, given: Mapping[str, Any]) -> Submission | FanOutResult:
    """Launch the job or the fan-out that a receipt was issued for; everything is checked again.

    `given` are arguments that came with the receipt, which must be those of its job. Raises Conflict where they are
    not, or where the file that the script came from has another text now, and whatever `submit` raises.
    """
    issued = read_receipt(ctx.ledger, receipt).issued
    base = issued.plan.base if issued.plan is not None else issued.spec
    if base is None:
        raise Conflict(
            "the receipt records no arguments to launch: it is about a price or about limits, or is an older one",
            do(Action.SUBMIT, "with all arguments, for a fresh receipt", receipt=""),
        )
    more = {name: value for name, value in given.items() if value and value != JobSpec.model_fields[name].default}
    if build(JobSpec, base.model_dump() | more) != base:
        raise Conflict("the receipt is for other arguments", ANOTHER_RECEIPT)
    if issued.script_file and not receipt_used(ctx.ledger, receipt):
        _check_file(ctx.cwd or Path.cwd(), issued, base)
    if issued.plan is not None:
        return await fan_out(ctx, issued.plan, receipt=receipt)
    return await submit(ctx, base, receipt=receipt)


def _check_file(root: Path, issued: ReceiptIssued, base: JobSpec) -> None:
    """Raise Conflict where the script's file is not the one that was checked."""
    name = line(issued.script_file)
    try:
        changed = script_in(root, issued.script_file) != base.script
    except BadRequest as gone:
        raise Conflict(f"the script that was checked can't be read again: {gone.message}", ANOTHER_RECEIPT) from gone
    if changed:
        raise Conflict(f"what was checked has changed since the receipt: {name} is another text", ANOTHER_RECEIPT)
