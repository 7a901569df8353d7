"""Compute simulated costs. A cost is a function of a record and a time, so no charges are lost in a crash."""

from __future__ import annotations

import math

from gpuwarden.core.models import InstanceState, Resources
from gpuwarden.core.profile import Profile, UnknownFact
from gpuwarden.rehearsal.model import Record, Settings

_S = InstanceState
_UP = frozenset({_S.BOOTING, _S.RUNNING, _S.STOPPING, _S.TERMINATING, _S.FAILED})
_OFF = frozenset({_S.STOPPED, _S.INTERRUPTED})


def price(settings: Settings, profile: Profile, resources: Resources) -> float:
    """Return the price in simulated dollars per hour; 0 on a platform without a meter."""
    if not profile.meter.metered:
        return 0.0
    names = {name.casefold(): usd for name, usd in settings.catalog.items()}
    each = names.get((resources.gpu or "").casefold(), settings.default_usd_per_hour)
    factor = settings.interruptible_factor if resources.interruptible else 1.0
    return each * resources.gpu_count * factor


def computes(profile: Profile, record: Record) -> bool:
    """Return whether compute is billed in the record's current state.

    An instance whose boot failed is billed until it is terminated. A stopped instance is billed if the profile's
    `stops_on` lacks `stop`. An interrupted instance is not billed, because the platform has reclaimed the GPU.
    """
    if not profile.meter.metered:
        return False
    if record.state == _S.STOPPED:
        return "stop" not in profile.meter.stops_on or record.fault("bills_when_stopped") is not None
    return record.state in _UP


def leaves_residue(profile: Profile, record: Record) -> bool:
    """Return whether anything other than compute, such as a disk, is or may be billed in the record's current state."""
    if not profile.meter.metered or record.state not in _OFF | {_S.GONE}:
        return False
    return bool(profile.residue("stop" if record.state in _OFF else "terminate", requested=record.durable))


def turn(profile: Profile, settings: Settings, record: Record, at: float) -> Record:
    """Start or stop the record's two meters so that they match its state at the time `at`.

    Charges after the instance has ended belong to a volume. Their rate is reported, but their cost is not added here.
    """
    compute = computes(profile, record)
    residue = record.state in _OFF and leaves_residue(profile, record)
    if compute and record.compute_since is None:
        record = record.but(compute_since=at)
    elif not compute and record.compute_since is not None:
        record = record.but(compute_since=None, compute_s=_compute_s(profile, settings, record, at))
    if residue and record.residue_since is None:
        record = record.but(residue_since=at)
    elif not residue and record.residue_since is not None:
        record = record.but(residue_since=None, residue_s=_residue_s(settings, record, at))
    return record


def cost(profile: Profile, settings: Settings, record: Record, now: float) -> float:
    """Return the cost up to `now`, in simulated dollars. It never decreases as `now` increases."""
    compute = _compute_s(profile, settings, record, now) * record.usd_per_hour
    residue = _residue_s(settings, record, now) * record.residue_usd_per_hour
    return (compute + residue) / 3600


def _compute_s(profile: Profile, settings: Settings, record: Record, now: float) -> float:
    """Return the billed compute time in seconds. Each period is rounded up to a multiple of the billing granularity."""
    if record.compute_since is None:
        return record.compute_s
    grain = profile.meter.granularity_s
    step = 1 if isinstance(grain, UnknownFact) else max(1, grain)
    open_s = max(0.0, now - record.compute_since) * settings.time_scale
    return record.compute_s + math.ceil(open_s / step) * step


def _residue_s(settings: Settings, record: Record, now: float) -> float:
    open_s = 0.0 if record.residue_since is None else max(0.0, now - record.residue_since)
    return record.residue_s + open_s * settings.time_scale
