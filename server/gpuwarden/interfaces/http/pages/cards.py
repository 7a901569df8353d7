"""Build the cards that clients show inside a conversation: one job, or all machines (MCP Apps, SEP-1865).

A card is a document without data, made from the page's templates, with inline style and scripts. The tool's result
contains the view, and the script writes the view into the document as text. A card can't load or request any other
content: it has no connection, form or link, and its script calls no tool.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from functools import cache
from typing import Final, Literal, TypeAlias

import anyio.to_thread
from markupsafe import Markup

from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import line, plain
from gpuwarden.interfaces.cli.drawing import local
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.http.pages.curves import curve_of, names_of
from gpuwarden.interfaces.http.pages.job import TITLES, job_view
from gpuwarden.interfaces.http.pages.now import account_row
from gpuwarden.interfaces.http.pages.rendering import Row, View, clean, environment, shown, step_rows
from gpuwarden.interfaces.http.pages.static_files import files
from gpuwarden.interfaces.results import warned
from gpuwarden.interfaces.results.inventory import InstanceReply, InstancesReply
from gpuwarden.lifecycle.artifacts.proof_steps import StageState, proof_steps
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.auto_teardown import notices
from gpuwarden.lifecycle.monitoring.check import CheckedJob
from gpuwarden.lifecycle.records import read_job
from gpuwarden.metrics.store import Curve

Kind: TypeAlias = Literal["job", "machines"]
STYLES: Final = ("page.css", "card.css")
SCRIPTS: Final = ("view.js", "card.js")
WIDTH: Final = 320.0
HEIGHT: Final = 96.0
EDGE: Final = 3.0
"""Distance between a line and the upper and lower edge, in drawing units."""
POINTS: Final = 240
FEW_POINTS: Final = 60
"""Maximum number of points in a curve that is shown in a list."""
ROWS: Final = 20
"""Maximum number of entries in a list on a card."""
FOLLOWED: Final = 8
"""Maximum number of machines in a list that are shown with their job's curve and evidence."""
TEXT: Final = 400
"""Maximum number of characters in one string on a card, such as a path, a name or a reason."""
FIELDS: Final = {
    "texts": (
        "state",
        "why",
        "note",
        "name",
        "platform",
        "step",
        "source",
        "left",
        "exit",
        "to_come",
        "ending",
        "rate",
    ),
    "numbers": ("percent",),
    "flags": ("progress",),
    "meters": ("cost",),
    "lists": ("rungs", "alerts", "diagnoses", "steps", "clocks", "store"),
}
"""The parts of a job's view that its card shows."""


@cache
def document(kind: Kind) -> str:
    """Return a card's HTML.

    The card's content security policy allows only its own script and style, and no requests.
    """
    read = {name: files()[name][0].decode() for name in (*STYLES, *SCRIPTS)}
    style, script = ("\n".join(read[name] for name in names) for names in (STYLES, SCRIPTS))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    empty = {
        "texts": defaultdict(str),
        "flags": defaultdict(bool),
        "numbers": defaultdict(float),
        "lists": defaultdict(tuple),
        "meters": defaultdict(lambda: {"amount": None, "rate": 0.0}),
    }
    # Trusted files in this package, which the policy pins by their digests.
    inside = {"style": Markup(style), "script": Markup(script)}  # noqa: S704
    return environment().get_template(f"card_{kind}.html").render(view=empty, kind=kind, policy=policy, **inside)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


async def card_of(ctx: Context, seen: CheckedJob | InstancesReply) -> View:
    """Return the view that a card shows for a tool result."""
    view = await (machines_card(ctx, seen) if isinstance(seen, InstancesReply) else job_card(ctx, seen))
    view = clean(ctx, view)  # before texts are truncated, because a truncated secret would not be found
    view["texts"] = _short(view["texts"])
    view["lists"] = {name: [_short(row) for row in rows[:ROWS]] for name, rows in view["lists"].items()}
    return {**view, "at": ctx.clock.now()}


async def job_card(ctx: Context, seen: CheckedJob) -> View:
    """Return the view of a job that was just polled."""
    page = job_view(ctx, seen.job.id, seen, None)
    view: View = {part: {name: page[part][name] for name in names} for part, names in FIELDS.items()}
    metric, curve = await anyio.to_thread.run_sync(_first_curve, ctx, seen.job.id, seen, POINTS)
    view["texts"] |= {"id": seen.job.id, "looked": f"updated {local(ctx.clock.now(), '%Y-%m-%d %H:%M:%S')}"}
    view["texts"] |= curve_texts(metric, curve)
    view["flags"]["curve"] = bool(curve.x)
    view["lines"] = {"curve": curve_line(curve), "odd": odd_line(curve)}
    return {"card": "job", **view}


async def machines_card(ctx: Context, reply: InstancesReply) -> View:
    """Return the view of all machines. The meter shows the cost of the machines that are or may be billed."""
    reply = warned(reply.model_copy(), notices(ctx), in_commands)
    rows = [machine_row(row) for row in reply.instances[:ROWS]]
    for row in [row for row in rows if row["job"]][:FOLLOWED]:
        row |= await anyio.to_thread.run_sync(_progress, ctx, row["job"])
    over = len(reply.instances) - ROWS
    billing = [row for row in reply.instances if row.billing is not False]
    hidden = sum(row.cost_usd is None or row.price_usd_per_hour is None for row in billing)
    rate = sum(row.price_usd_per_hour or 0.0 for row in billing)
    return {
        "card": "machines",
        "texts": {
            "message": shown(reply.message),
            "rate": usd_per_hour(rate) if billing else "",
            "hidden": f"excluding {counted(hidden, 'machine')} with an unknown cost or price" if hidden else "",
            "over": f"{counted(over, 'machine')} not shown" if over > 0 else "",
            "looked": f"updated {local(ctx.clock.now(), '%Y-%m-%d %H:%M:%S')}",
        },
        "meters": {"total": {"amount": sum(row.cost_usd or 0.0 for row in billing), "rate": rate}},
        "lists": {
            "machines": rows,
            "accounts": [account_row(account) for account in reply.accounts],
            "unknown": [{"key": k, "name": shown(k), "text": shown(v)} for k, v in reply.unknown.items()],
            "warnings": [{"key": text, "text": shown(text)} for text in reply.warnings],
            "steps": step_rows(reply.next),
        },
    }


def _short(row: Row) -> Row:
    """Return a row without links and log lines, which a card can't show, and with strings of limited length."""
    left_out = {"href", "lines"}
    return {name: text if name == "curve" else line(text, TEXT) for name, text in row.items() if name not in left_out}


def machine_row(row: InstanceReply) -> Row:
    """Return one machine in the list."""
    clock = row.clocks[0] if row.clocks else None
    return {
        "key": f"{row.platform} {row.instance_id}",
        "state": {True: "billing", False: "off", None: "unknown"}[row.billing],
        "bills": {True: "billed", False: "not billed", None: "may be billed"}[row.billing],
        "name": shown(row.platform if row.ours else f"{row.platform}, not rented here"),
        "id": shown(row.instance_id or "id unknown"),
        "job": row.job_id or "",
        "job_state": row.job_state or "",
        "rate": "" if row.billing is False else usd_per_hour(row.price_usd_per_hour),
        "cost": "" if row.cost_usd is None else usd(row.cost_usd, row.cost_estimated),
        "clock": f"{local(clock.at, '%m-%d %H:%M')} {shown(clock.effect)}" if clock else "",
        "text": shown(row.note),
    }


def _progress(ctx: Context, job_id: str) -> Row:
    """Return the name, curve and evidence of the job on a machine."""
    job = read_job(ctx.ledger, job_id)
    metric, curve = _first_curve(ctx, job_id, None, FEW_POINTS)
    proven = [TITLES[step.stage].lower() for step in proof_steps(ctx, job) if step.state is StageState.YES]
    words = curve_texts(metric, curve)
    return {
        "name": shown(f"{job.spec.name} on {job.spec.platform}"),
        "curve": curve_line(curve),
        "curve_text": f"{words['metric']} {words['curve']}".strip(),
        "proof": f"evidence: {', '.join(proven) or 'none yet'}",
    }


def _first_curve(ctx: Context, job_id: str, seen: CheckedJob | None, points: int) -> tuple[str, Curve]:
    """Return a job's first metric and its curve."""
    names = names_of(ctx.metrics, job_id, seen)
    metric = names[0] if names else ""
    return metric, curve_of(ctx.metrics, job_id, metric, seen, points=points)


def curve_texts(metric: str, curve: Curve) -> Row:
    """Describe a curve in words: its first and last value, its range, and the number of non-finite values."""
    if not curve.values:
        return dict.fromkeys(("metric", "curve", "high", "low", "odd"), "")
    first, last, low, high = curve.values[0], curve.values[-1], min(curve.values), max(curve.values)
    begin, end = (local(x, "%m-%d %H:%M") if curve.by_time else f"step {x:,.0f}" for x in (curve.x[0], curve.x[-1]))
    return {
        "metric": shown(plain(metric)),
        "curve": f"{first:.4g} at {begin} to {last:.4g} at {end}, lowest {low:.4g}",
        "high": f"{high:.4g}",
        "low": f"{low:.4g}" if low < high else "",
        "odd": f"{curve.odd:,} not finite" if curve.odd else "",
    }


def curve_line(curve: Curve) -> str:
    """Return a curve as an SVG path of moves and lines. A non-finite value is a gap."""
    points: list[tuple[float, float | None]] = [*zip(curve.x, curve.values, strict=True)]
    points += [(mark.x, None) for mark in curve.markers]
    low, high = min(curve.values, default=0.0), max(curve.values, default=0.0)
    scale = (HEIGHT - 2 * EDGE) / ((high - low) or 1.0)
    parts, open_ = [], False
    for x, y in sorted(points, key=lambda point: point[0]):
        if y is not None:
            place = f"{_across(curve, x):.1f} {EDGE + (high - y) * scale:.1f}"
            # A line of zero length draws a dot for a value without a neighbor.
            parts.append(f"L{place}" if open_ else f"M{place}L{place}")
        open_ = y is not None
    return "".join(parts)


def odd_line(curve: Curve) -> str:
    """Return an SVG path with a short mark at the bottom for each non-finite value."""
    places = sorted({round(_across(curve, mark.x), 1) for mark in curve.markers if curve.x})
    return "".join(f"M{x} {HEIGHT:.0f}L{x} {HEIGHT - 12:.0f}" for x in places)


def _across(curve: Curve, x: float) -> float:
    return min(WIDTH, max(0.0, WIDTH * (x - curve.x[0]) / ((curve.x[-1] - curve.x[0]) or 1.0)))
