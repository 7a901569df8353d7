"""Contact a machine over SSH for the first time: pin its host key, then check that it can run a job.

The key is recorded, for the lease or for the user's machine, before any other data is sent. From then on, no other key
is accepted. A rented machine is probed once. If it is unfit, the job fails and the machine stays rented until the user
decides. A machine that the user owns is probed by the submit gate.
"""

from __future__ import annotations

from gpuwarden.backends.base import HostKeyBackend
from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.guidance import steps
from gpuwarden.core.models import Place
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.ledger.events import HostChecked, HostTrusted
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import LeaseRecord
from gpuwarden.remote.ssh.host_keys import HostKey, HostKeyChanged


class NoContact(Exception):
    """The machine can't be contacted yet. The message is the reason."""


class Unfit(Refused):
    """The probe found the machine unfit for jobs."""


async def bootstrap(ctx: Context, lease: LeaseRecord, place: Place) -> Place:
    """Pin the machine's host key, check the machine, and return its place. A repeated call skips finished steps.

    Raises NoContact while the machine can't be reached, and Unfit with the findings if it can't run jobs.
    """
    backend = ctx.backend(ctx.profile(lease.platform).backend)
    if not isinstance(backend, HostKeyBackend):
        return place
    place = pinned(ctx, lease.id, place)
    if place.host_key is None:
        try:
            key = await backend.host_key(place)
        except Refused:
            raise
        except WardenError as silence:
            raise NoContact(silence.message) from silence
        ctx.ledger.add(lease.subject, _contact(place, key))
        place = place.model_copy(update={"host_key": key.line})
    checked = ctx.ledger.last(lease.subject, HostChecked)
    findings = checked.data.findings if checked else tuple(await backend.check(place))
    if checked is None:
        lost = next((f for f in findings if f.rule == "PF-HOST-001" and f.severity is Severity.UNKNOWN), None)
        if lost is not None:
            raise NoContact(lost.message)
        ctx.ledger.add(lease.subject, HostChecked(findings=findings))
    errors = [f for f in findings if f.severity is Severity.ERROR]
    if errors:
        raise Unfit(
            "; ".join(f.message for f in errors),
            [step for f in errors for step in f.fix],
            tuple(errors),
        )
    return place


def pinned(ctx: Context, lease_id: str, place: Place) -> Place:
    """Return the place that the provider reported, with the host key from the first contact."""
    trusted = ctx.ledger.last(f"lease/{lease_id}", HostTrusted)
    return place.model_copy(update={"host_key": trusted.data.host_key}) if trusted else place


async def pin_host_key(ctx: Context, place: Place) -> Place:
    """Return the user's machine with its host key pinned: the key in known_hosts, or else the key that the machine
    presented on first contact.

    The local machine has no host key. Raises HostKeyChanged if the key differs from the pinned one, and the backend's
    errors if the machine can't be reached.
    """
    backend = ctx.backend(ctx.profile(place.platform).backend)
    if not isinstance(backend, HostKeyBackend) or place.host is None:
        return place
    key, subject = await backend.host_key(place), f"host/{place.host}"
    trusted = ctx.ledger.last(subject, HostTrusted)
    if trusted is None or trusted.data.host_key != key.line:
        if trusted is not None and key.first_contact:
            changed = HostKeyChanged(str(place.host), trusted.data.fingerprint, key.fingerprint)
            changed.next_steps = steps(
                "Another machine has that address or is intercepting the connection. If you reinstalled your machine, "
                f"compare the fingerprint on it, then run ssh once to add it to your known_hosts: ssh {place.host}"
            )
            raise changed
        ctx.ledger.add(subject, _contact(place, key))
    return place.model_copy(update={"host_key": key.line})


async def probe_host(ctx: Context, place: Place) -> list[Finding]:
    """Probe the user's machine for the submit gate, after pinning its host key. Raises HostKeyChanged."""
    met = ctx.ledger.last(f"host/{place.host}", HostTrusted) is not None
    pinned = await pin_host_key(ctx, place)
    return await ctx.backend(ctx.profile(place.platform).backend).check(pinned if met else place)


def _contact(place: Place, key: HostKey) -> HostTrusted:
    how = "trusted on first use" if key.first_contact else "listed in known_hosts"
    return HostTrusted(
        host_key=key.line,
        fingerprint=key.fingerprint,
        host=place.host,
        port=place.port,
        why=f"first contact: its host key {key.fingerprint} is {how}; no other key will be accepted",
    )
