"""Automatic teardown as they hold now, and whether a watch runs that carries them out. It imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.states import LIVE_LEASES
from gpuwarden.ledger.events import EndingObjected, EndingOrdered, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import carried
from gpuwarden.policy_record import Notice

WATCH_FILE: Final = "watch.json"
"""What the leading watch remembers from round to round, below the state folder."""
ROUND: Final = "watch|round|"
"""The entry of that file for the round itself; conditions have theirs beside it."""
WATCHED_S: Final = 900.0
"""A timer that looks this often counts as a watch."""


def order_for(ctx: Context, receipt: str, at: float | None = None) -> EndingOrdered | None:
    """Return the order that a job gets with its acceptance; None where a person is to be asked.

    `at` is when the approval has to be good, where that is not now. What a person said about this one job comes before
    the policy. Another policy or ledger than the recorded one orders nothing.
    """
    in_force = ctx.in_force
    wanted = in_force.policy.teardown
    said, grace_s = carried(ctx, receipt, at), wanted.grace_minutes * 60.0
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    storage = issued.data.storage if issued is not None else ()
    if said is not None and said.auto_teardown is not None:
        return EndingOrdered(
            verb=said.auto_teardown,
            grace_s=grace_s,
            through="approval",
            policy=said.policy,
            receipt=receipt,
            by=said.by,
            storage=storage,
        )
    if wanted.automatic == "off" or any(notice.question for notice in in_force.notices):
        return None
    verb, digest = wanted.automatic, in_force.digest
    return EndingOrdered(verb=verb, grace_s=grace_s, through="policy", policy=digest, storage=storage)


def automatic_teardown(ctx: Context, job_id: str) -> EndingOrdered | None:
    """Return the order under which a job's machine ends without a further question; None after an objection.

    An order through the policy holds while the policy in force gives it too.
    """
    ordered = ctx.ledger.last(f"job/{job_id}", EndingOrdered)
    objected = ctx.ledger.last(f"job/{job_id}", EndingObjected)
    return in_force(ctx, ordered.data) if ordered is not None and objected is None else None


def in_force(ctx: Context, order: EndingOrdered) -> EndingOrdered | None:
    """Return an order as it holds now: with the longer grace, and a terminate covers a stop.

    A policy that can't be read orders nothing.
    """
    if order.through == "approval":
        return order
    with contextlib.suppress(WardenError):
        wanted = ctx.policy.teardown
        if wanted.automatic in {order.verb, "terminate"}:
            return order.model_copy(update={"grace_s": max(order.grace_s, wanted.grace_minutes * 60.0)})
    return None


def rounds(ctx: Context) -> tuple[float, float]:
    """Return since when watches went round without a long gap, and when one last did; 0 where none ever did.

    In seconds since the epoch.
    """
    try:
        since, last, _ = json.loads((ctx.home / WATCH_FILE).read_text("utf-8"))[ROUND]
        return float(since), float(last)
    except (OSError, ValueError, LookupError, TypeError):
        return 0.0, 0.0


def watched(ctx: Context) -> bool:
    """Return whether a watch went round lately."""
    return ctx.clock.now() - rounds(ctx)[1] < WATCHED_S


def notices(ctx: Context) -> tuple[Notice, ...]:
    """Return what a reply about costs starts with: that no watch carries out automatic teardown, then the policy's."""
    ordered = False
    with contextlib.suppress(WardenError):  # a broken policy is a warning itself
        ordered = ctx.policy.teardown.automatic != "off"
    ordered = ordered or any(automatic_teardown(ctx, job) for job in ctx.ledger.jobs_with_leases(*LIVE_LEASES))
    return ctx.warnings if not ordered or watched(ctx) else (Notice("unwatched", ""), *ctx.warnings)
