"""Ask the platform to stop or terminate a machine. Only an observation ends a lease; an accepted request does not."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import RateLimited, WardenError
from gpuwarden.core.models import Instance, InstanceState, Unknown, Verb
from gpuwarden.core.profile import Profile
from gpuwarden.core.states import Teardown
from gpuwarden.ledger.events import ApprovalGranted, LeaseLook, VerbIntent, VerbSent
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.accounts import BoundProvider
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.records import TeardownRecord

ASK_AGAIN_S: Final = 30.0
"""Seconds to wait for an accepted request to take effect before sending it again."""
FIRST_WAIT_S: Final = 5.0
MOST_WAIT_S: Final = 300.0
LONGEST_ASKED_S: Final = 3600.0
"""Maximum wait in seconds at a platform's request. It is limited because the machine is billed in the meantime."""
_ENDING: Final = frozenset({InstanceState.TERMINATING, InstanceState.GONE})
_DOWN: Final = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED, InstanceState.FAILED})


def voided(ctx: Context, record: TeardownRecord) -> bool:
    """Return whether an approved request is no longer valid. No call may be sent for an invalid request.

    Either automatic teardown approved the request and was canceled later, or the approval expired before the first call
    was sent, for example because the process died or the computer was asleep.
    """
    granted = ctx.ledger.last(record.subject, ApprovalGranted)
    if granted is None:
        return False
    automatic = granted.data.channel == "automatic_teardown"
    expired = record.state is Teardown.EXECUTING and not granted.data.holds_at(ctx.clock.now())
    return (automatic and automatic_teardown(ctx, record.job_id) is None) or (expired and not call_sent(ctx, record))


def call_sent(ctx: Context, record: TeardownRecord) -> bool:
    """Return whether a call to the provider was sent, or may have been sent, since a request was approved."""
    granted = ctx.ledger.last(record.subject, ApprovalGranted)
    calls = (ctx.ledger.last(f"lease/{record.lease}", kind) for kind in (VerbIntent, VerbSent))
    return granted is not None and any(call is not None and call.seq > granted.seq for call in calls)


async def request_end(ctx: Context, lease_id: str, verb: Verb, by: TeardownRecord | None = None) -> None:
    """Send the next provider call to stop or terminate a machine. If the platform requires it, the machine is stopped
    first.

    No call is sent if the machine is already terminating or reported gone, if its platform accepted the same call less
    than `ASK_AGAIN_S` seconds ago, or if its platform requested a wait. A refusal or a lost reply is recorded, and the
    next invocation retries. No call is sent for a void teardown request (`by`); the transaction that checks this also
    records the intent.
    """
    lease = lease_now(ctx, lease_id)
    last = ctx.ledger.last(lease.subject, LeaseLook)
    if lease.instance is None or (last is not None and last.data.saw == "gone"):
        return  # a second poll will confirm this
    step = next_verb(ctx.profile(lease.platform), lease.instance, verb)
    if step is None:
        return
    before = ctx.ledger.last(lease.subject, VerbSent)
    if before is not None:
        same = before.data.verb == step and before.data.taken
        until = before.at + ASK_AGAIN_S if same else before.data.not_before or 0.0
        if before.at <= ctx.clock.now() < until:  # if the clock was set back, the remaining wait is unknown
            return
    with ctx.ledger.transaction():  # a hold that is recorded after this transaction is too late
        if by is not None and voided(ctx, by):
            return
        ctx.ledger.add(lease.subject, VerbIntent(verb=step))
    provider = BoundProvider(ctx, lease)
    try:
        answer = await (provider.stop if step == "stop" else provider.terminate)(lease.instance.id)
        why = answer.why if isinstance(answer, Unknown) else None
        sent = VerbSent(verb=step, taken=True) if why is None else VerbSent(verb=step, taken=False, why=why)
    except RateLimited as busy:
        # Wait as long as the platform requests, but at least for a delay that doubles with each consecutive refusal.
        earlier = reversed(ctx.ledger.events(lease.subject, kind=VerbSent))
        refused = sum(1 for _ in takewhile(lambda event: event.data.not_before is not None, earlier))
        backoff_s = doubled(FIRST_WAIT_S, refused + 1, MOST_WAIT_S)
        not_before = ctx.clock.now() + max(min(busy.after_s or 0.0, LONGEST_ASKED_S), backoff_s)
        sent = VerbSent(verb=step, taken=False, why=busy.message, not_before=not_before)
    except WardenError as error:
        sent = VerbSent(verb=step, taken=False, why=error.message)
    ctx.ledger.add(lease.subject, sent)


def next_verb(profile: Profile, instance: Instance, verb: Verb) -> Verb | None:
    """Return the next call (`stop` or `terminate`) that is needed to carry out `verb`; None if none is needed."""
    if instance.state in _ENDING:
        return None
    if verb == "stop":
        return None if instance.state is InstanceState.STOPPED else "stop"
    return "stop" if profile.verbs.terminate_needs_stop and instance.state not in _DOWN else "terminate"
