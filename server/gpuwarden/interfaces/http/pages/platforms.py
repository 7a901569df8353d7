"""Build the views for platforms (storage persistence, deadlines) and references (known failures)."""

from __future__ import annotations

from typing import Any, Final, get_args

from gpuwarden.core.profile import Event, Profile, UnknownFact
from gpuwarden.core.states import LIVE_LEASES
from gpuwarden.interfaces.cli.drawing import local
from gpuwarden.interfaces.http.pages.rendering import Row, View, shown
from gpuwarden.interfaces.results.references import entry, look_up
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.leases.expirations import clocks_of
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.balances import known_funds
from gpuwarden.lifecycle.records import lease_ids, read_job

EVENTS: Final = get_args(Event)
HEADS: Final = {"stop": "stop", "terminate": "terminate", "preemption": "interruption", "job_end": "end of the job"}


def platforms_view(ctx: Context) -> View:
    """Return every platform with its storage persistence, and the deadlines of rented machines."""
    names = [name for name in ctx.platforms() if not name.startswith(REHEARSAL)]
    return {
        "heads": [HEADS[event] for event in EVENTS],
        "platforms": [platform_row(name, ctx.profile(name)) for name in names],
        "lists": {"clocks": running_clocks(ctx)},
    }


def platform_row(name: str, profile: Profile) -> dict[str, Any]:
    """Return one platform with a row for each storage tier, and the platform's automatic actions."""
    return {
        "id": profile.id,
        "name": name,
        "title": profile.title,
        "kind": profile.kind,
        "stops": ", ".join(profile.meter.stops_on) or ("nothing is billed" if not profile.meter.metered else "unknown"),
        "note": profile.meter.note,
        "tiers": [
            {
                "name": tier.tier,
                "path": tier.path,
                "present": tier.present.replace("_", " "),
                "survives": [fact_row(getattr(tier.survives, event), "survives", "lost") for event in EVENTS],
                "bills": fact_row(tier.bills_when_stopped, "yes", "no"),
                "note": tier.note,
            }
            for tier in profile.storage
        ],
        "clocks": [
            {
                "trigger": clock.trigger,
                "after": f"unknown: {clock.after.unknown}" if isinstance(clock.after, UnknownFact) else clock.after,
                "effect": clock.effect,
            }
            for clock in profile.danger_clocks
        ],
        "verified": profile.meter.verified,
        "source": profile.meter.source,
    }


def fact_row(value: bool | UnknownFact, yes: str, no: str) -> Row:
    """Return one fact as a word. `state` selects its color; `title` describes how to establish an unknown fact."""
    if isinstance(value, UnknownFact):
        return {"state": "unknown", "text": "unknown", "title": value.unknown}
    return {"state": "yes" if value else "no", "text": yes if value else no, "title": ""}


def running_clocks(ctx: Context) -> list[Row]:
    """Return the times at which platforms will act on rented machines, earliest first.

    They include the time at which an account's balance runs out, according to the last poll.
    """
    found = [(funds.clock, "", funds.platform) for funds in known_funds(ctx) if funds.clock is not None]
    for lease_id in lease_ids(ctx.ledger, *LIVE_LEASES):
        lease = lease_now(ctx, lease_id)
        job = read_job(ctx.ledger, lease.job_id)
        found += [(clock, job.id, lease.platform) for clock in clocks_of(ctx, lease, job)]
    return [
        {
            "key": f"{platform} {job_id} {clock.at} {clock.trigger}",
            "href": f"/jobs/{job_id}" if job_id else "/",
            "at": local(clock.at, "%Y-%m-%d %H:%M"),
            "name": f"{shown(platform)} {job_id}".strip(),
            "text": f"{shown(clock.trigger)}: {shown(clock.effect)}",
        }
        for clock, job_id, platform in sorted(found, key=lambda one: one[0].at)
    ]


def knowledge_view(query: str) -> View:
    """Return the reference entries that match a symptom or log lines."""
    reply = look_up(query) if query.strip() else None
    return {
        "query": query,
        "message": reply.message if reply else "",
        "hits": [{**hit.model_dump(), "href": f"/knowledge/{hit.id}"} for hit in (reply.hits if reply else ())],
    }


def entry_view(key: str) -> View | None:
    """Return one known failure with all fields; None if the id is unknown."""
    found = entry(key)
    return None if found is None else found.model_dump(mode="json")
