"""Asking a provider for a machine's stop or end. Only an observation ends a lease; an answer is a claim."""

from __future__ import annotations

from typing import Final

from gpuwarden.core.errors import RateLimited, WardenError
from gpuwarden.core.models import Instance, InstanceState, Unknown, Verb
from gpuwarden.core.profile import Profile
from gpuwarden.ledger.events import LeaseLook, VerbSent
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.accounts import Bound
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.records import LeaseRecord

ASK_AGAIN_S: Final = 30.0
"""How long a verb that the platform took is given to show an effect before it is sent again."""
FIRST_WAIT_S: Final = 5.0
MOST_WAIT_S: Final = 300.0
LONGEST_ASKED_S: Final = 3600.0
"""What a platform may ask us to wait at most: the machine bills meanwhile."""
_ENDING: Final = frozenset({InstanceState.TERMINATING, InstanceState.GONE})
_DOWN: Final = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED, InstanceState.FAILED})


async def request_end(ctx: Context, lease_id: str, verb: Verb) -> None:
    """Take the next step towards a machine's stop or end: a stop first, where the platform wants one.

    Nothing is sent to a machine that is on its way already, was just seen gone, took the verb a moment ago, or whose
    platform asked us to wait. A refusal or a lost reply is recorded, and the next call asks again.
    """
    lease = lease_now(ctx, lease_id)
    last = ctx.ledger.last(lease.subject, LeaseLook)
    if lease.instance is None or (last is not None and last.data.saw == "gone"):
        return  # the second look confirms it
    step = next_verb(ctx.profile(lease.platform), lease.instance, verb)
    if step is not None and ctx.clock.now() >= _not_before(ctx, lease, step):
        await _send(ctx, lease, lease.instance, step)


def next_verb(profile: Profile, instance: Instance, verb: Verb) -> Verb | None:
    """Return the verb to send now so that a machine gets stopped or terminated; None when there is none to send."""
    if instance.state in _ENDING:
        return None
    if verb == "stop":
        return None if instance.state is InstanceState.STOPPED else "stop"
    return "stop" if profile.verbs.terminate_needs_stop and instance.state not in _DOWN else "terminate"


def _not_before(ctx: Context, lease: LeaseRecord, verb: Verb) -> float:
    """Return when a verb may be sent, in seconds since the epoch."""
    sent = ctx.ledger.last(lease.subject, VerbSent)
    if sent is None:
        return 0.0
    return sent.at + ASK_AGAIN_S if sent.data.verb == verb and sent.data.taken else sent.data.not_before or 0.0


async def _send(ctx: Context, lease: LeaseRecord, instance: Instance, verb: Verb) -> None:
    provider = Bound(ctx, lease)
    try:
        answer = await (provider.stop if verb == "stop" else provider.terminate)(instance.id)
        why = answer.why if isinstance(answer, Unknown) else None
        sent = VerbSent(verb=verb, taken=True) if why is None else VerbSent(verb=verb, taken=False, why=why)
    except RateLimited as busy:
        not_before = ctx.clock.now() + _wait(ctx, lease, busy)
        sent = VerbSent(verb=verb, taken=False, why=busy.message, not_before=not_before)
    except WardenError as error:
        sent = VerbSent(verb=verb, taken=False, why=error.message)
    ctx.ledger.add(lease.subject, sent)


def _wait(ctx: Context, lease: LeaseRecord, busy: RateLimited) -> float:
    """Return the seconds to wait: what the platform asks for, doubled after each refusal in a row."""
    refused = 0
    for event in reversed(ctx.ledger.events(lease.subject, kind=VerbSent)):
        if event.data.not_before is None:
            break
        refused += 1
    return max(min(busy.after_s or 0.0, LONGEST_ASKED_S), min(FIRST_WAIT_S * 2.0 ** min(refused, 16), MOST_WAIT_S))
