"""The views for the start page (running jobs, open approvals and billing) and for the list of all jobs."""

from __future__ import annotations

from gpuwarden.core.money import money, usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.interfaces.cli.drawing import auto_teardown_lines, billing_now, local, progress_parts
from gpuwarden.interfaces.http.pages.rendering import Row, View, first_command, shown
from gpuwarden.interfaces.results.inventory import AccountReply, InstanceReply
from gpuwarden.interfaces.results.overview import JobLineReply, JobsReply, StatusReply, WaitingReply

ANSWERED = frozenset({"teardown", "spending", "price"})
"""Kinds of decisions that have an approval page."""
ROWS = 50
"""Maximum number of rows in a list; the page of all jobs lists the others."""


def now_view(reply: StatusReply) -> View:
    """Return the start page's view. The page advances each meter at its hourly rate."""
    spent, alike = reply.spending, (*reply.running, *reply.ended)
    cap = spent.per_day_cap_usd
    pretend = sum(line.price_usd_per_hour or 0.0 for line in alike if line.billing and line.pretend)
    billing = [line for line in alike if line.billing]
    title = [f"{len(reply.waiting)} waiting"] if reply.waiting else []
    title += [f"{len(billing)} billed"] if billing else []
    return {
        "at": reply.at,
        "meters": {
            "today": {"amount": spent.today_usd, "rate": spent.usd_per_hour},
            "pretend": {"amount": spent.rehearsed_today_usd, "rate": pretend},
        },
        "texts": {
            "now": billing_now(reply),
            "left": f"{usd(max(0.0, cap - spent.today_usd))} left of {usd(cap)} today" if cap > 0 else "",
            "cap": "" if cap > 0 else "no daily cap: all spending needs approval",
            "month": f"{usd(spent.month_usd)} this month",
            "pretend": f"simulated rehearsal costs{f', {usd_per_hour(pretend)}' if pretend else ''}",
            "updated": local(reply.at, "%H:%M:%S"),
            "title": " · ".join([*title, "gpuwarden"]),
        },
        "numbers": {"budget": min(100.0, 100 * spent.today_usd / cap) if cap > 0 else 0.0},
        "flags": {
            "billing": bool(billing),
            "cap": cap > 0,
            "pretend": bool(pretend or spent.rehearsed_today_usd),
            "quiet": not (reply.running or reply.waiting or reply.ended),
        },
        "lists": {
            "waiting": [waiting_row(w) for w in reply.waiting[:ROWS]],
            "running": [job_row(line) for line in reply.running[:ROWS]],
            "ended": [job_row(line) for line in reply.ended[:ROWS]],
            "others": [other_row(other) for other in reply.others[:ROWS]],
            "accounts": [account_row(account) for account in reply.accounts],
            "alerts": [{"key": text, "text": shown(text)} for text in reply.alerts[:ROWS]],
            "unknown": [{"key": k, "name": shown(k), "text": shown(v)} for k, v in reply.unknown.items()],
            "warnings": [{"key": text, "text": shown(text)} for text in reply.warnings],
        },
    }


def job_row(line: JobLineReply) -> Row:
    """Return a job's row in a list."""
    share = line.step / line.total_steps if line.step is not None and line.total_steps else None
    clock = line.clocks[0] if line.clocks else None
    return {
        "key": line.job_id,
        "href": f"/jobs/{line.job_id}",
        "state": line.state,
        "name": shown(line.name),
        "project": shown(line.project),
        "person": shown(line.person),
        "platform": shown(line.platform),
        "since": local(line.since, "%m-%d %H:%M"),
        "progress": " · ".join(progress_parts(line)),
        "percent": "" if share is None else f"{min(100.0, 100 * share):.1f}",
        "rate": f"billed {usd_per_hour(line.price_usd_per_hour)}" if line.billing else "",
        "cost": usd(line.cost_usd, line.cost_estimated) if line.cost_usd or line.billing else "",
        "clock": f"{local(clock.at, '%m-%d %H:%M')} {shown(clock.effect)}" if clock else "",
        "ending": shown(" · ".join(auto_teardown_lines(line.ending))) if line.ending else "",
    }


def waiting_row(waiting: WaitingReply) -> Row:
    """Return one decision that waits for the user, with the command for it."""
    return {
        "key": waiting.ticket,
        "state": waiting.kind,
        "kind": waiting.kind.replace("_", " "),
        "text": shown(waiting.text),
        "command": first_command(waiting.next),
        "since": f"asked {local(waiting.since, '%m-%d %H:%M')}",
        "until": f"until {local(waiting.expires_at, '%m-%d %H:%M')}" if waiting.expires_at else "",
        "job": waiting.job_id or "",
        "href": f"/jobs/{waiting.job_id}" if waiting.job_id else "",
        "look": "Review" if waiting.kind in ANSWERED else "",
        "page": f"/approve/{waiting.ticket}",
    }


def other_row(other: InstanceReply) -> Row:
    """Return one machine that no job in this ledger uses."""
    return {
        "key": f"{other.platform} {other.instance_id}",
        "state": "unknown" if other.billing is None else "billing",
        "name": f"{shown(other.platform)} {shown(other.instance_id or 'id unknown')}",
        "bills": "may be billed" if other.billing is None else "billed",
        "rate": usd_per_hour(other.price_usd_per_hour),
        "text": shown(other.note),
    }


def account_row(account: AccountReply) -> Row:
    """Return the balance and the spending rate of one platform's account."""
    currency = account.currency or "USD"
    burn = f"{money(account.per_hour, currency)}/h" if account.per_hour else ""
    clock = account.clock
    return {
        "key": account.platform,
        "name": shown(account.platform),
        "balance": "unknown" if account.balance is None else money(account.balance, currency),
        "rate": f"spends {burn}" if burn else "",
        "clock": f"ends {local(clock.at, '%m-%d %H:%M')}: {shown(clock.effect)}" if clock else "",
        "text": shown(account.note),
    }


def jobs_view(reply: JobsReply) -> View:
    """Return the view of one page in the list of all jobs."""
    return {
        "lists": {"jobs": [job_row(line) for line in reply.jobs]},
        "texts": {"message": shown(reply.message), "count": counted(len(reply.jobs), "job")},
        "after": reply.after or "",
    }
