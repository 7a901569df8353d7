"""The output for the payer: status, jobs, costs, waits, and pending approvals, from the ledger and with real jobs."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from bench.ledger import House, begins, ends
from rich.console import Console

from cli_kit import Cli, Life, ended, launched
from doors import PLATFORM, at_terminal
from gpuwarden.core.guidance import approval
from gpuwarden.core.models import Observation
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli import console, screen
from gpuwarden.interfaces.cli.drawing import BLOCKS, local, span, sparkline
from gpuwarden.interfaces.results.overview import SpendingReply, StatusReply, WaitingReply
from gpuwarden.ledger import events as ev
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import with_printed_progress
from gpuwarden.lifecycle.monitoring.overview import cached_overview, job_page
from gpuwarden.lifecycle.monitoring.spending import charges, day_start, month_start, total
from gpuwarden.lifecycle.monitoring.wait import MOST_S, wait
from gpuwarden.lifecycle.monitoring.waiting import what_waits
from gpuwarden.lifecycle.teardown.gate import request
from grown_ledger import grown, steps
from wording import Wording

pytestmark = pytest.mark.anyio
HOUR = 3600.0


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set this computer's time zone."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(name="house")
def house_fixture(tmp_path: Path) -> House:
    return House(tmp_path / "house", "vastai")


def rent(house: House, job: str, hours: float, cost: float | None) -> None:
    """Add a job whose machine ran for `hours` and cost `cost` dollars."""
    house.write(begins(job, "vastai"))
    house.clock.time += hours * HOUR
    for subject, body in ends(job, "vastai"):
        stopped = isinstance(body, ev.LeaseStopped)
        house.ledger.add(subject, body.model_copy(update={"cost_usd": cost}) if stopped else body)


# ------------------------------------------------------------------------------------------------------------ costs


def test_cost_is_spread_over_local_days(house: House, zone: str) -> None:
    house.clock.time = day_start(house.clock.time) + 22 * HOUR
    begun = house.clock.time
    rent(house, "jnight", 10, 20.0)
    mine = [c for c in charges(house.ctx, begun - HOUR) if c.job_id == "jnight"]
    assert [round(c.usd or 0, 6) for c in mine] == [4.0, 16.0]
    assert mine[0].day == datetime.fromtimestamp(begun).astimezone().strftime("%Y-%m-%d") < mine[1].day
    later = [c for c in charges(house.ctx, begun + 7 * HOUR) if c.job_id == "jnight"]
    assert [round(c.usd or 0, 6) for c in later] == [6.0], "only the share of the asked time"


@pytest.mark.parametrize("day", ["2025-03-09", "2025-11-02", "2026-02-28", "2024-12-31"])
def test_daily_costs_handle_days_of_23_or_25_hours(house: House, zone: str, day: str) -> None:
    house.clock.time = datetime.fromisoformat(f"{day}T00:00").astimezone().timestamp()
    begun = house.clock.time
    rent(house, "jlong", 48, 48.0)
    mine = [c for c in charges(house.ctx, begun) if c.job_id == "jlong"]
    assert round(total(mine), 6) == 48.0 and len({c.day for c in mine}) == len(mine)
    assert mine[0].day == day and 23 <= round(mine[0].usd or 0, 6) <= 25
    assert month_start(begun) <= day_start(begun) == begun
    for hour in range(23):
        assert day_start(begun + hour * HOUR) == begun, "also after the clocks were changed"
    for before in range(1, 40):
        earlier = datetime.fromisoformat(f"{day}T00:00") - timedelta(days=before)
        assert day_start(begun + HOUR / 2, before) == earlier.astimezone().timestamp()


def test_unknown_cost_is_counted_as_unknown(house: House, run: Cli) -> None:
    from gpuwarden.interfaces.results import costs_of

    rent(house, "jknown", 1, 3.0)
    found = charges(house.ctx, house.clock.time - 24 * HOUR)
    blank = [c.__class__(c.day, c.platform, "tag", "jblank", None) for c in found[:1]]
    reply = costs_of([*found, *blank], 0.0, "project")
    rows = {row.key: row for row in reply.rows}
    assert rows["tag"].unknown == 1 and rows["(none)"].usd >= 3.0


@pytest.mark.slow
def test_costs_are_printed_as_json_and_csv(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    ended(run, job_id)
    code, body = run("costs", "--by", "platform")
    assert code == 0 and [row["key"] for row in body["rows"]] == [PLATFORM] and body["total_usd"] == 0.0, (
        "pretend money"
    )
    code, text = run.shown("costs", "--by", "platform", "--csv")
    rows = list(csv.reader(io.StringIO(text)))
    assert code == 0 and rows[0][0] == "platform" and rows[1][0] == PLATFORM and float(rows[1][1]) >= 0


def test_csv_cells_are_escaped_against_formulas() -> None:
    from gpuwarden.interfaces.cli.screen import costs_csv
    from gpuwarden.interfaces.results.overview import CostReply, CostsReply

    rows = [CostReply(key=key, usd=1.0, machines=1) for key in ("=1+1", "@x", "-1", "fine,name")]
    table = list(csv.reader(io.StringIO(costs_csv(CostsReply(since=0.0, by="project", rows=rows)))))
    assert [row[0] for row in table[1:]] == ["'=1+1", "'@x", "'-1", "fine,name"]


# ------------------------------------------------------------------------------------------------------------- jobs


def test_job_pages_list_each_job_once(house: House) -> None:
    house.grow(30)
    pages, after = list[str](), ""
    while True:
        page = job_page(house.ctx, limit=7, after=after)
        pages += [line.job.id for line in page.lines]
        if page.after is None:
            break
        after = page.after
    assert len(pages) == len(set(pages)) == 33
    assert [line.job.id for line in job_page(house.ctx, states=(Job.RUNNING,)).lines] == ["jlive1", "jlive0"]
    assert job_page(house.ctx, platform="runpod").lines == ()
    assert job_page(house.ctx, project="none").lines == () and len(job_page(house.ctx, platform="vastai").lines) == 20


def test_unknown_page_start_or_state_is_an_error(run: Cli) -> None:
    assert run("jobs", "--after", "jnone")[1]["code"] == "not_found"
    assert run("jobs", "--state", "refused")[1]["code"] == "bad_request"


# ------------------------------------------------------------------------------------------- pending approvals, status


@pytest.mark.prove
def test_pending_approval_is_shown_after_any_command_at_a_terminal(life: Life, run: Cli, home: Path) -> None:
    blocked = anyio.run(life.blocked)
    assert what_waits(life.ctx) == [], f"{blocked} needs a proof first, not a person"
    anyio.run(pull, life.ctx, life.job_id)
    anyio.run(verify_job, life.ctx, life.job_id)
    ticket = anyio.run(request, life.ctx, life.job_id, "terminate").record.id
    waiting = what_waits(life.ctx)
    assert [(w.ticket, w.kind, w.job_id) for w in waiting] == [(ticket, "teardown", life.job_id)]
    assert waiting[0].price_usd_per_hour and waiting[0].cost_usd is not None
    for words in (["status"], ["approve"]):
        code, body = run(*words)
        assert code == 0 and body["waiting"][0]["ticket"] == ticket
        assert f"gpuwarden approve {ticket}" in body["waiting"][0]["hint"]
        code, text = run.shown(*words)
        assert code == 0 and f"gpuwarden approve {ticket}" in " ".join(text.split()) and "\x1b" not in text
        assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 160
    for words in (["jobs"], ["rules"], ["check", life.job_id], ["costs"], ["doctor"], ["--help"], ["status"]):
        code, text = at_terminal(home, *words, says={})
        assert code == 0, text
        assert f"gpuwarden approve {ticket}" in "\n".join(text.splitlines()[-24:]), "within one screen"
    assert f"gpuwarden approve {ticket}" in at_terminal(home, "check", "jnone", says={})[1], "after an error"
    assert ticket not in at_terminal(home, "rules", "--json", says={})[1], "one JSON object"
    assert ticket not in run.shown("jobs")[1], "not in a pipe"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_narrow_terminal_shortens_names_and_never_the_command(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(width=width, file=io.StringIO(), highlight=False))
    ask = {"kind": "teardown", "text": "", "since": 0.0, "platform": "rehearsal/prime-intellect", "cost_usd": 1234.56}
    tickets = [f"t{n:010x}" for n in range(3)]
    waiting = [
        WaitingReply(ticket=t, name="n" * 40, price_usd_per_hour=27.5, next=[approval(t)], **ask) for t in tickets
    ]
    money = {"today_usd": 0.0, "month_usd": 0.0, "usd_per_hour": 0.0, "per_day_cap_usd": 0.0}
    reply = StatusReply(ok=True, code="ok", message="", at=0.0, spending=SpendingReply(**money), waiting=waiting)
    console.out.print(screen.drawn(reply))
    shown = console.out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    lines = [line for line in shown if "gpuwarden approve" in line]
    assert [line.split()[-1] for line in lines] == tickets and max(map(len, shown)) <= width


def test_expired_or_answered_question_is_not_pending(house: House) -> None:
    now, ledger = house.clock.now(), house.ctx.ledger

    def issue(name: str, **more: Any) -> None:
        body = {"spec_digest": "d", "facts_digest": "f", "expires_at": now + 600, "name": name, "ask": "above the cap"}
        ledger.add(f"receipt/{name}", ev.ReceiptIssued(**{**body, **more}))

    issue("ropen", worst_cost=12.5, price=2.5, platform="vastai", timeout_s=3600)
    issue("rexpired", expires_at=now - 1)
    issue("rinside", ask="")
    issue("ranswered")
    ledger.add("receipt/ranswered", ev.ApprovalGranted(digest="f", channel="terminal", by="u", expires_at=now + 600))
    found = what_waits(house.ctx)
    assert [(w.ticket, w.kind, w.cost_usd) for w in found] == [("ropen", "spending", 12.5)]
    house.clock.time += 601
    assert what_waits(house.ctx) == []


@pytest.mark.slow
def test_status_shows_ended_jobs_that_still_bill(run: Cli, train: Path, ctx: Context) -> None:
    job_id = launched(run, train)
    ended(run, job_id)
    code, body = run("status")
    assert code == 0 and body["running"] == []
    assert [(line["job_id"], line["state"], line["billing"]) for line in body["ended"]] == [(job_id, "succeeded", True)]
    assert body["spending"]["usd_per_hour"] == 0.0 < body["spending"]["rehearsed_today_usd"] + 1
    code, text = run.shown()
    assert job_id in text and "/h" in text and datetime.now().astimezone().strftime("%Z") in text
    assert run("status", "--offline")[1]["ended"][0]["job_id"] == job_id


@pytest.mark.slow
def test_check_shows_progress_that_the_script_only_printed(run: Cli, train: Path) -> None:
    job_id = launched(run, train)
    body = ended(run, job_id)
    assert (body["step"], body["metrics"]["loss"], body["progress_from"]) == (1, 0.5, "output")
    assert body["started_at"] and body["elapsed_s"] >= 0
    code, text = run.shown("check", job_id)
    assert code == 0 and local(body["started_at"]) in text and "step 1" in text


def test_progress_is_read_from_the_log_without_a_runner() -> None:
    text = "  4%|4  | 20/500 [00:10<04:00,  2.0it/s]\r{'loss': '1.25', 'learning_rate': '1e-05', 'epoch': '0.2'}\n"
    found = with_printed_progress(Observation(state=Job.RUNNING), text)
    assert found is not None and (found.step, found.total_steps, found.source) == (20, 500, "output")
    assert found.metrics == {"loss": 1.25, "learning_rate": 1e-05}
    odd = with_printed_progress(Observation(state=Job.RUNNING), text + "{'loss': nan, 'epoch': 0.3}")
    assert odd is not None and "loss" not in odd.metrics and [a.subject for a in odd.alerts] == ["loss"]
    known = Observation(state=Job.RUNNING, last_beat_at=1.0)
    assert with_printed_progress(known, text) is known, "a runner's word counts, even of nothing"
    assert with_printed_progress(None, text) is None


# ------------------------------------------------------------------------------------------------------------- wait


def seen(step: int, *alerts: str) -> Observation:
    return Observation(state=Job.RUNNING, step=step, alerts=tuple({"kind": k, "text": k} for k in alerts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("until", "looks", "came"),
    [
        ("step", [seen(1), seen(1), seen(2)], True),
        ("step", [seen(1), seen(1, "stall")], False),
        ("alert", [seen(1), seen(2), seen(3, "stall")], True),
        ("alert", [seen(1, "stall"), seen(2, "stall")], False),
        ("state", [seen(1), seen(2, "stall")], False),
        ("end", [seen(1), seen(2, "stall")], False),
    ],
)
async def test_wait_ends_with_the_awaited_change_or_the_timeout(
    house: House, monkeypatch: pytest.MonkeyPatch, until: Any, looks: list[Observation], came: bool
) -> None:
    left = list(looks)

    async def advance(ctx: Context, job_id: str) -> None:
        ctx.observed[job_id] = left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr("gpuwarden.lifecycle.monitoring.wait.advance", advance)
    begun = house.clock.now()
    assert await wait(house.ctx, "jlive0", until, 60) is came
    took = house.clock.now() - begun
    assert took <= 60 if came else 60 <= took <= 60 + MOST_S


@pytest.mark.parametrize("until", ["step", "state", "alert", "end"])
async def test_state_change_ends_every_wait_except_until_end(
    house: House, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    looks = 0

    async def advance(ctx: Context, job_id: str) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            ctx.ledger.add(f"job/{job_id}", ev.JobPaused())

    monkeypatch.setattr("gpuwarden.lifecycle.monitoring.wait.advance", advance)
    assert await wait(house.ctx, "jlive0", until, 60) is (until != "end")
    assert looks > 3 if until == "end" else looks == 3


@pytest.mark.parametrize("until", ["step", "end"])
async def test_wait_for_an_ended_job_returns_at_once(house: House, until: Any) -> None:
    house.end_one("jover")
    begun = house.clock.now()
    assert await wait(house.ctx, "jover", until, 500) and house.clock.now() == begun


@pytest.mark.slow
def test_watch_refreshes_its_screen_on_a_terminal(life: Life, home: Path) -> None:
    ticket = anyio.run(life.waiting)
    anyio.run(request, life.ctx, life.job_id, "terminate")
    with pytest.raises(AssertionError) as shown:  # the watch runs until it is stopped
        at_terminal(
            home,
            "watch",
            "--every",
            "1",
            says={},
            enough=lambda text: text.count(f"gpuwarden approve {ticket}") > 1 and "$" in text,
        )
    text = str(shown.value)
    assert text.count(f"gpuwarden approve {ticket}") > 1 and "$" in text


# ------------------------------------------------------------------------------------------------------------ growth


def test_jobs_from_earlier_months_barely_slow_a_glance(tmp_path: Path) -> None:
    def cost(jobs: int) -> int:
        house = grown(tmp_path / str(jobs), "vastai", jobs)
        house.clock.time += 32 * 24 * HOUR
        return steps(house, lambda: cached_overview(house.ctx, {}))

    assert cost(400) < 1.2 * cost(40) + 50


# ---------------------------------------------------------------------------------------------------------- drawing


def test_durations_and_sparklines_are_formatted() -> None:
    assert [span(s) for s in (None, 0, 8, 250, 3600, 12_000, 190_000)] == [
        "-",
        "0s",
        "8s",
        "4m 10s",
        "1h",
        "3h 20m",
        "2d 4h",
    ]
    assert sparkline([1.0]) == "" and sparkline([2.0, 2.0]) == BLOCKS[0] * 2
    assert sparkline([float(n) for n in range(100)]) == "".join(BLOCKS[round(n / 23 * 7)] for n in range(24))


def test_billing_with_an_unknown_price_is_not_shown_as_nothing(house: House, wording: Wording) -> None:
    from gpuwarden.interfaces.cli.drawing import billing_now
    from gpuwarden.interfaces.results import status_of

    def bill(price: float | None, platform: str = "vastai") -> str:
        reply = status_of(cached_overview(house.ctx, {}))
        lines = [line.model_copy(update={"price_usd_per_hour": price, "platform": platform}) for line in reply.running]
        return billing_now(reply.model_copy(update={"running": lines}))

    assert "$4.00/h" in bill(2.0) and "$" not in bill(1.0, "rehearsal/vastai")
    for said in (bill(2.0), bill(None), bill(1.0, "rehearsal/vastai")):
        wording(said)


def test_a_long_status_fits_one_screen_of_80_columns(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from gpuwarden.interfaces.cli import screen
    from gpuwarden.interfaces.results import status_of

    for n in range(60):
        house.write(begins(f"jmany{n}", "vastai"))
    reply = status_of(cached_overview(house.ctx, {"vastai": "no answer"}))
    text = Console(width=80, height=24, file=io.StringIO(), record=True)
    text.print(screen.drawn(reply, 24))
    lines = text.export_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80, "\n".join(lines)
    assert any("gpuwarden jobs" in line for line in lines) and any("no answer" in line for line in lines)


def test_times_are_shown_in_the_local_time_zone(zone: str) -> None:
    from gpuwarden.interfaces.cli import console

    at = 1_800_000_000.0
    moment = datetime.fromtimestamp(at).astimezone()
    assert console.when(at) == moment.strftime("%Y-%m-%d %H:%M:%S") and local(at) == moment.strftime("%H:%M")
    assert (zone == "UTC") is (moment.utcoffset() == timedelta(0))
    assert local(None) == local(float("inf")) == local(-1e30) == "-"
