"""The view of machine costs by day, platform, project, person and job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from gpuwarden.core.money import usd
from gpuwarden.core.plural import counted
from gpuwarden.interfaces import results
from gpuwarden.interfaces.http.pages.rendering import Row, View, shown
from gpuwarden.interfaces.results.overview import CostReply, CostsReply
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.spending import charges, day_start
from gpuwarden.lifecycle.records import read_job

SPANS: Final = (7, 30, 90)
"""Selectable periods in days."""
JOBS: Final = 50
"""Maximum number of jobs that the page lists, most expensive first."""


def money_view(ctx: Context, days: int) -> View:
    """Return the machine costs for the last `days` days. Simulated costs are shown but not added to the total."""
    since = day_start(ctx.clock.now(), days - 1)
    found = charges(ctx, since)
    by = {
        key: results.costs_of(found, since, key, ctx.policy.team)
        for key in ("day", "platform", "project", "person", "job")
    }
    unknown = sum(row.unknown for row in by["job"].rows)
    jobs = sorted(by["job"].rows, key=lambda row: row.usd, reverse=True)
    columns = _columns(by["day"], since, days)
    return {
        "days": days,
        "spans": SPANS,
        "texts": {
            "total": usd(by["day"].total_usd),
            "first": columns[0]["key"],
            "last": columns[-1]["key"],
            "unknown": f"the cost of {counted(unknown, 'job')} is unknown and not included" if unknown else "",
            "more": f"and {len(jobs) - JOBS:,} more" if len(jobs) > JOBS else "",
        },
        "chart": [
            {"title": f"{row['key']} {row['cost']}", "y": f"{100 - float(row['height']):.2f}", "height": row["height"]}
            for row in columns
        ],
        "lists": {
            "day": [{"key": row["key"], "cost": row["cost"]} for row in reversed(columns)],
            "platform": _bars(by["platform"].rows),
            "project": _bars(by["project"].rows),
            "person": _bars(by["person"].rows),
            "job": [
                {
                    **row,
                    "href": f"/jobs/{row['key']}",
                    "name": shown(read_job(ctx.ledger, row["key"]).spec.name),
                    "id": row["key"],
                }
                for row in _bars(jobs[:JOBS])
            ],
        },
    }


def _bars(rows: list[CostReply]) -> list[Row]:
    """Return rows with their costs as percentages of the highest cost."""
    most = max((row.usd for row in rows), default=0.0) or 1.0
    return [
        {
            "key": row.key,
            "name": shown(row.key),
            "cost": usd(row.usd),
            "jobs": counted(row.machines, "job")
            + ("" if row.per_day_cap_usd is None else f", daily cap {usd(row.per_day_cap_usd)}"),
            "unknown": f"{row.unknown} unknown" if row.unknown else "",
            "percent": f"{100 * row.usd / most:.1f}",
        }
        for row in rows
    ]


def _columns(costs: CostsReply, since: float, days: int) -> list[Row]:
    """Return one column per day, including days without costs. Heights are percentages of the most expensive day."""
    spent = {row.key: row for row in costs.rows}
    most = max((row.usd for row in costs.rows), default=0.0) or 1.0
    first = datetime.fromtimestamp(since, UTC).astimezone().date()
    names = [(first + timedelta(days=n)).isoformat() for n in range(days)]
    return [
        {
            "key": name,
            "height": f"{100 * spent[name].usd / most:.2f}" if name in spent else "0",
            "cost": usd(spent[name].usd) if name in spent else usd(0.0),
        }
        for name in names
    ]
