"""Danger clocks with dates: what a platform will do to a machine by itself, and when."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.core.models import Instance, InstanceState
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord
from gpuwarden.lifecycle.warden import Warden

OFF = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED})


@dataclass(frozen=True)
class Clock:
    """One danger clock of one machine: when it fires (seconds since the epoch), why, and what happens then."""

    at: float
    trigger: str
    effect: str


def stopped_at(w: Warden, lease: LeaseRecord) -> float | None:
    """When a machine was first seen off in its present rest; None while it is not off."""
    if lease.instance is None or lease.instance.state not in OFF:
        return None
    seen = [e for e in w.ledger.events(lease.subject) if "instance" in e.body]
    first: float | None = None
    for event in reversed(seen):
        if Instance.model_validate(event.body["instance"]).state not in OFF:
            break
        first = event.at
    return w.clock.now() if first is None else first


def clocks_of(w: Warden, lease: LeaseRecord, job: JobRecord) -> tuple[Clock, ...]:
    """The clocks that run for a machine of ours and whose date is known, the next one first."""
    if lease.instance is not None and lease.instance.state is InstanceState.GONE:
        return ()
    created = lease.instance.created_at if lease.instance and lease.instance.created_at else lease.opened_at
    off = stopped_at(w, lease)
    found = [
        Clock(at, clock.trigger, clock.effect)
        for clock in w.profile(lease.platform).danger_clocks
        if not (clock.without_timeout and job.spec.timeout_s) and (at := clock.fires_at(created, off)) is not None
    ]
    if (ends_at := _ends_at(w, lease)) is not None:
        found.append(
            Clock(ends_at, "the end that the platform has set", "the machine is stopped or ended, and with it the job")
        )
    return tuple(sorted(found, key=lambda c: c.at))


def _ends_at(w: Warden, lease: LeaseRecord) -> float | None:
    """When the platform ends the machine, as it last told; some tell it only in their answer to the create."""
    if lease.instance is not None and lease.instance.ends_at is not None:
        return lease.instance.ends_at
    told = [at for e in w.ledger.events(lease.subject) if (at := (e.body.get("instance") or {}).get("ends_at"))]
    return float(told[-1]) if told else None
