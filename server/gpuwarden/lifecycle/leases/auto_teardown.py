"""Find the automatic-teardown order for a job, and check whether a watch is running that can execute the order."""

from __future__ import annotations

import contextlib
import json
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.states import LIVE_LEASES
from gpuwarden.ledger.events import AutoTeardownHeld, AutoTeardownOrdered, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import carried
from gpuwarden.policy_record import Notice

WATCH_FILE: Final = "watch.json"
"""File in the state folder in which the leading watch keeps its state between rounds."""
ROUND: Final = "watch|round|"
"""Key in `WATCH_FILE` for the times of the watch's rounds. The other keys belong to conditions."""
WATCHED_S: Final = 900.0
"""A watch, or the timer used instead, counts as running for this many seconds after its last round."""


def order_for(ctx: Context, receipt: str, at: float | None = None) -> AutoTeardownOrdered | None:
    """Return the automatic-teardown order for a job that is being accepted; None if the user will be asked.

    `at` is the time at which the approval must be valid; None for the current time. A decision about this job takes
    precedence over the policy. The policy is ignored while its file or the ledger differs from the recorded one.
    """
    active = ctx.active_policy
    wanted = active.policy.teardown
    order, grace_s = carried(ctx, receipt, at), wanted.grace_minutes * 60.0
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    storage = issued.data.storage if issued is not None else ()
    if order is not None and order.auto_teardown is not None:
        return AutoTeardownOrdered(
            verb=order.auto_teardown,
            grace_s=grace_s,
            through="approval",
            policy=order.policy,
            receipt=receipt,
            by=order.by,
            storage=storage,
        )
    if wanted.automatic == "off" or any(notice.question for notice in active.notices):
        return None
    verb, digest = wanted.automatic, active.digest
    return AutoTeardownOrdered(verb=verb, grace_s=grace_s, through="policy", policy=digest, storage=storage)


def automatic_teardown(ctx: Context, job_id: str) -> AutoTeardownOrdered | None:
    """Return the automatic-teardown order that applies to a job; None after a hold.

    An order from the policy is valid only as long as the active policy contains it.
    """
    ordered = ctx.ledger.last(f"job/{job_id}", AutoTeardownOrdered)
    objected = ctx.ledger.last(f"job/{job_id}", AutoTeardownHeld)
    return effective_order(ctx, ordered.data) if ordered is not None and objected is None else None


def effective_order(ctx: Context, order: AutoTeardownOrdered) -> AutoTeardownOrdered | None:
    """Return an order as it applies now, with its grace period or the current policy's, whichever is longer.

    A policy that allows `terminate` also allows `stop`. Return None if the policy does not contain the order or can't
    be read.
    """
    if order.through == "approval":
        return order
    with contextlib.suppress(WardenError):
        wanted = ctx.policy.teardown
        if wanted.automatic in {order.verb, "terminate"}:
            return order.model_copy(update={"grace_s": max(order.grace_s, wanted.grace_minutes * 60.0)})
    return None


def rounds(ctx: Context) -> tuple[float, float]:
    """Return the start of the watch's current run without long gaps, and the time of its last round.

    Both are in seconds since the epoch, or 0 if no watch has run.
    """
    try:
        since, last, _ = json.loads((ctx.home / WATCH_FILE).read_text("utf-8"))[ROUND]
        return float(since), float(last)
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0, 0.0


def watched(ctx: Context) -> bool:
    """Return whether a watch ran a round in the last `WATCHED_S` seconds."""
    return ctx.clock.now() - rounds(ctx)[1] < WATCHED_S


def notices(ctx: Context) -> tuple[Notice, ...]:
    """Return the notices for a reply about costs.

    If automatic teardown is on but no watch is running, the first notice reports this.
    """
    ordered = False
    with contextlib.suppress(WardenError):  # the warnings already report an invalid policy
        ordered = ctx.policy.teardown.automatic != "off"
    ordered = ordered or any(automatic_teardown(ctx, job) for job in ctx.ledger.jobs_with_leases(*LIVE_LEASES))
    return ctx.warnings if not ordered or watched(ctx) else (Notice("unwatched", ""), *ctx.warnings)
