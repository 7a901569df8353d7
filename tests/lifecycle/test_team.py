"""A team on one ledger: submitters are recorded, each has their own caps, and only approvers can approve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client

from approving_kit import FROM_PAGE, asked, entered, shown_digest
from doors import quick_warden
from fakes import FakeClock
from gpuwarden.app import open_context
from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest, Conflict, Refused
from gpuwarden.core.policy import Allowance, Caps, Policy, Team
from gpuwarden.interfaces.cli.approval import grant_spending, open_spending
from gpuwarden.interfaces.cli.policy_choice import ask_use
from gpuwarden.interfaces.cli.tokens import create_token, list_tokens
from gpuwarden.interfaces.http.access import cookie_name
from gpuwarden.interfaces.results import costs_of, jobs_of
from gpuwarden.ledger.events import ApprovalGranted, JobAccepted, PasskeyRegistered
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.overview import job_page
from gpuwarden.lifecycle.monitoring.spending import charges
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import NeedsApproval, submit
from gpuwarden.lifecycle.teardown.gate import approve, request
from gpuwarden.lifecycle.teardown.passkeys import allow, allowed, passkeys, register
from gpuwarden.people import acting_as, current_user
from gpuwarden.rehearsal.model import Settings
from http_kit import bearer, client, listening, serving, transport
from lifecycle_kit import PLATFORM, launch, open_house, rent_cloud, work
from page_kit import busy_world
from talk_kit import ERAS, Talk
from terminal import Typed
from wording import Wording

pytestmark = pytest.mark.anyio
PASSKEY = PasskeyRegistered(credential="Y3JlZA", public_key="a2V5", site="localhost")


def team(ctx: Context, **changes: Any) -> None:
    ctx.policy = ctx.policy.model_copy(update={"team": Team(**changes)})


@pytest.fixture
def house(tmp_path: Path) -> Context:
    ctx = open_house(tmp_path / "home", FakeClock())
    rent_cloud(ctx, settings=Settings(boot_s=0, stop_s=0))
    return ctx


# ------------------------------------------------------------------------------------------------- who submitted


@pytest.mark.slow
async def test_a_job_and_its_cost_belong_to_the_submitting_user(house: Context) -> None:
    jobs = {}
    for person in ("alice", "bob"):
        with acting_as(person):
            jobs[person] = await launch(house, work(person))
    old = await launch(house, work("old"))  # by a process that names no user, as in older versions
    assert [read_job(house.ledger, job).person for job in (*jobs.values(), old)] == ["alice", "bob", ""]
    assert {event.actor for event in house.ledger.history(f"job/{jobs['bob']}")} == {"cli/bob"}
    found = charges(house, 0.0)
    assert {charge.person for charge in found} == {"alice", "bob", ""}
    real = [replace(charge, platform="vastai", usd=2.0) for charge in found]
    rows = costs_of(real, 0.0, "person", Team(people={"bob": Allowance(per_day_usd=5)})).rows
    assert [(row.key, row.per_day_cap_usd) for row in rows] == [("(none)", None), ("alice", None), ("bob", 5.0)]
    assert {line.person for line in jobs_of(job_page(house)).jobs} == {"alice", "bob", ""}


@pytest.mark.slow
async def test_an_ended_machine_stays_on_its_users_bill(house: Context) -> None:
    with acting_as("alice"):
        job = await launch(house, work("one"))
    view = await request(house, job, "terminate")
    assert view.record.digest
    await approve(house, view.record.id, view.record.digest, channel="terminal", by="user x", loss="one")
    house.clock.advance(60)  # type: ignore[attr-defined]
    await list_instances(house)
    assert house.ledger.subjects("lease", "stopped")
    assert {charge.person for charge in charges(house, 0.0)} == {"alice"}


def test_a_process_acts_for_the_account_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = current_user()
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")
    assert current_user() == before
    ctx = open_context("mcp", env={"GPUWARDEN_HOME": str(tmp_path / "h"), "GPUWARDEN_POLICY": str(empty(tmp_path))})
    assert ctx.ledger.acting == f"mcp/{before}"


def empty(folder: Path, text: str = "") -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("mode", ERAS)
async def test_a_job_over_http_belongs_to_the_tokens_user(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    with listening(ctx) as (parts, _):
        people = {}
        for person, name in (("alice", "laptop"), ("", "ci")):
            secret = parts.tokens.create(name, ["read", "submit"], 1, person)[1]
            async with (
                httpx2.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=300) as http,
                Client(transport(parts, http), mode=mode) as mcp,  # type: ignore[arg-type]
            ):
                talk, told = (
                    Talk(mcp),
                    {"platform": PLATFORM, "command": ["true", name], "outputs": ["out"], "timeout_s": 60},
                )
                receipt = (await talk.call("submit_job", **told))["receipt"]
                people[name] = (await talk.call("submit_job", **told, receipt=receipt))["job_id"]
    found = {name: read_job(ctx.ledger, job).person for name, job in people.items()}
    assert found == {"laptop": "alice", "ci": "ci"}
    accepted = ctx.ledger.events(kind=JobAccepted)
    assert {event.actor.partition("/")[2] for event in accepted} == {"alice", "ci"}


async def test_a_token_belongs_to_the_user_named_at_the_terminal(house: Context) -> None:
    await create_token(house, "ci", ["read"], 30, Typed("yes"), person="alice")
    await create_token(house, "own", ["read"], 30, Typed("yes"))
    assert {row.name: row.person for row in list_tokens(house).tokens} == {"ci": "alice", "own": current_user()}
    with pytest.raises(BadRequest):
        await create_token(house, "bad", ["read"], 30, Typed("yes"), person="al\nice")


# -------------------------------------------------------------------------------------------------------- caps


@pytest.mark.slow
async def test_one_users_spending_does_not_use_another_users_cap(house: Context) -> None:
    worst = (await submit(house, work("look"))).worst_cost_usd
    assert worst
    team(house, people={"alice": Allowance(per_day_usd=1.5 * worst), "bob": Allowance()})
    with acting_as("alice"):
        await launch(house, work("a1"))
        first = await submit(house, work("a2"))
        assert "team.people.alice.per_day_usd" in first.ask
        with pytest.raises(NeedsApproval):
            await submit(house, work("a2"), receipt=first.receipt)
    with acting_as("bob"):
        await launch(house, work("b1"))
        assert (await submit(house, work("b2"))).ask == ""


@pytest.mark.attack("spending", "leaves the project out, or names another, to get round its cap")
async def test_a_project_cap_covers_all_users_and_unlisted_projects_need_approval(
    house: Context, wording: Wording
) -> None:
    worst = (await submit(house, work("look"))).worst_cost_usd
    assert worst
    team(house, projects={"llm": Allowance(per_job_usd=2 * worst, per_day_usd=1.5 * worst)})
    with acting_as("alice"):
        await launch(house, work("a1", "llm"))
    with acting_as("bob"):
        assert "team.projects.llm.per_day_usd" in (await submit(house, work("b1", "llm"))).ask
        for project in ("", "LLM", "other"):
            wording((await submit(house, work("b1", project))).ask, *filter(None, [project]))


@pytest.mark.attack("spending", "submits as somebody whom the policy does not name")
async def test_a_user_who_is_not_listed_needs_approval(house: Context, wording: Wording) -> None:
    team(house, people={"alice": Allowance()})
    for person in ("mallory", ""):
        with acting_as(person):
            wording((await submit(house, work("x"))).ask, *filter(None, [person]))


async def test_a_users_cap_never_loosens_the_general_caps(house: Context, wording: Wording) -> None:
    house.policy = Policy(rehearsal_caps=Caps(), local=house.policy.local)
    team(house, people={"alice": Allowance(per_job_usd=1_000, per_day_usd=1_000)})
    with acting_as("alice"):
        wording((await submit(house, work("x"))).ask, "per_job_usd", "$0.00")


@pytest.mark.attack("policy", "names an approver, a person or a cap in a variable")
def test_an_environment_variable_never_sets_a_team_setting(tmp_path: Path) -> None:
    file = empty(tmp_path, '[team]\napprovers = ["alice"]\n[team.people.alice]\nper_day_usd = 5\n')
    env = {"GPUWARDEN_HOME": str(tmp_path / "h"), "GPUWARDEN_POLICY": str(file)}
    config = load_config({**env, "GPUWARDEN_TEAM_APPROVERS": "mallory", "GPUWARDEN_TEAM_PEOPLE": "mallory"})
    assert config.policy.team == Team(approvers=("alice",), people={"alice": Allowance(per_day_usd=5)})
    assert {notice.about for notice in config.notices} >= {"team.approvers", "team.people"}
    assert {s.path: s.origin for s in config.settings if s.path.startswith("team.")} == {
        "team.approvers": "file", "team.people": "file", "team.projects": "default",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- approvals


@pytest.mark.attack("person", "approves without being one of those who may")
async def test_only_a_listed_approver_can_approve(house: Context, wording: Wording) -> None:
    with acting_as("alice"):
        job = await launch(house, work("one"))
    team(house, approvers=["bob"])
    house.policy = house.policy.model_copy(update={"rehearsal_caps": Caps()})
    receipt = (await submit(house, work("two"))).receipt
    assert receipt
    view = await request(house, job, "terminate")
    assert view.record.digest
    for person in ("alice", ""):
        with acting_as(person):
            with pytest.raises(Refused) as refused:
                grant_spending(house, open_spending(house, receipt), "terminal", "user x")
            wording(refused)
            with pytest.raises(Refused) as refused:
                await approve(house, view.record.id, view.record.digest, channel="terminal", by="x", loss="one")
            wording(refused)
    with acting_as("bob"):
        grant_spending(house, open_spending(house, receipt), "terminal", "user bob")
        await approve(house, view.record.id, view.record.digest, channel="terminal", by="user bob", loss="one")
    granted = house.ledger.events(kind=ApprovalGranted)
    assert {event.actor for event in granted} == {"cli/bob"} and len(granted) == 2


@pytest.mark.attack("person", "puts a policy of their own in force without being one who may approve")
async def test_only_a_listed_approver_can_change_the_policy(house: Context, tmp_path: Path) -> None:
    team(house, approvers=["bob"])
    generous = tmp_path / "generous.toml"
    generous.write_text("caps.per_job_usd = 1000\n")
    for person in ("alice", ""):
        with acting_as(person), pytest.raises(Refused):
            await ask_use(house, generous, Typed("yes"))
    assert not house.ledger.events(kind="policy.accepted")
    with acting_as("bob"):
        await ask_use(house, generous, Typed("yes"))
    assert [event.actor for event in house.ledger.events(kind="policy.accepted")] == ["cli/bob"]


@pytest.mark.attack("person", "makes a passkey or a token in the name of one who may approve")
async def test_only_an_approver_creates_credentials_for_another_user(house: Context, wording: Wording) -> None:
    team(house, approvers=["bob"])
    with acting_as("mallory"):
        for maker in (
            lambda: allow(house, "phone", "user mallory", "bob"),
            lambda: allow(house, "phone", "user mallory", "alice"),
        ):
            with pytest.raises(Refused) as refused:
                maker()
            wording(refused)
        with pytest.raises(Refused) as refused:
            await create_token(house, "ci", ["read", "submit"], 30, Typed("yes"), person="bob")
        wording(refused)
        allow(house, "own", "user mallory", "mallory")  # approves nothing: mallory is not listed
    with acting_as("bob"):
        allow(house, "phone", "user bob", "alice")
        await create_token(house, "ci", ["read", "submit"], 30, Typed("yes"), person="alice")


@pytest.mark.attack("spending", "launches as oneself what a person approved for somebody else")
async def test_only_the_receipts_user_can_use_approved_spending(house: Context, wording: Wording) -> None:
    team(house, people={"alice": Allowance(per_day_usd=0)})
    with acting_as("alice"):
        receipt = (await submit(house, work("a"))).receipt
        assert receipt
        grant_spending(house, open_spending(house, receipt), "terminal", "user x")
    with acting_as("mallory"), pytest.raises(Conflict) as refused:
        await submit(house, work("a"), receipt=receipt)
    wording(refused, "alice")
    with acting_as("alice"):
        assert (await submit(house, work("a"), receipt=receipt)).job is not None


async def test_a_passkey_approves_on_the_page_as_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user who opened the page does not matter. The signature itself has its own tests, with a real browser."""
    ctx = busy_world(tmp_path / "home").ctx
    register(ctx, allowed(ctx, allow(ctx, "phone", "user x", "bob")), PASSKEY)
    assert [one.person for one in passkeys(ctx)] == ["bob"]
    monkeypatch.setattr(
        "gpuwarden.interfaces.http.pages.approving.signed_by", lambda _site, _made, _answer, known: (known[0], 1)
    )
    for approvers, status in ((["alice"], 403), (["bob"], 200)):
        team(ctx, approvers=approvers)
        async with entered(ctx) as (_, http):
            await asked(http, "r7mixt", await shown_digest(http, "r7mixt"))
            answer = await http.post("/approve/r7mixt/answer.json", json={"credential": {}})
            assert answer.status_code == status, answer.text
    granted = ctx.ledger.last("receipt/r7mixt", ApprovalGranted)
    assert granted is not None and granted.data.by == "passkey phone" and granted.actor.endswith("/bob")


async def test_the_money_page_lists_spending_per_user(tmp_path: Path) -> None:
    ctx = busy_world(tmp_path / "home").ctx
    async with entered(ctx) as (_, http):
        assert 'data-list="person">' in (await http.get("/money")).text


async def test_a_browser_acts_as_the_user_who_opened_the_dashboard(tmp_path: Path) -> None:
    ctx = busy_world(tmp_path / "home").ctx
    async with serving(ctx) as parts, client(parts, FROM_PAGE) as http:
        await http.get(f"/enter?link={parts.tokens.create_link('alice')}")
        session = parts.principal(http.cookies[cookie_name(parts)])
        token = parts.principal(bearer(parts, "read", name="old")["Authorization"].removeprefix("Bearer "))
    assert session is not None and session.person == "alice" and token is not None and token.person == "old"
