"""Approval by URL: the client opens the page, but only the page or a terminal decides, whatever the client answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import ElicitCompleteNotification, ElicitRequestURLParams, ElicitResult, InputRequiredResult

from approving_kit import coded, mark_of, shown_digest
from doors import JOB, POLICY, environment, quick_warden
from gpuwarden.interfaces.cli.approval import grant_spending, open_spending
from gpuwarden.interfaces.http.record import recorded
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.gate import withdraw
from http_kit import JSON, MODERN, bearer, envelope, listening, transport
from talk_kit import ERAS, Person, Talk, metering, talking
from warm import warm

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
WAIT_S = 1.0
"""Limit on the server's wait. A user may take longer than a test should."""
STDIO = (
    "from gpuwarden.interfaces.mcp import page_approvals as asked;"
    f"asked.MAX_WAIT_S = {WAIT_S};"
    "from gpuwarden.interfaces.cli.main import run; run(['mcp'])"
)
DECLINE, ACCEPT = ElicitResult(action="decline"), ElicitResult(action="accept")
NAMES = (f"client-{n}" for n in itertools.count())
Opening = Callable[[str], Awaitable[None]]


class Opener(Person):
    """A client's user who answers a request to open the page, and may act on the page."""

    def __init__(self, answer: Any = ACCEPT, there: Opening | None = None) -> None:
        super().__init__(answer)
        self.there = there
        self.params: list[ElicitRequestURLParams] = []
        self.complete: list[str] = []

    async def __call__(self, context: object, params: Any) -> ElicitResult:
        assert isinstance(params, ElicitRequestURLParams), "the policy allows no form"
        self.params.append(params)
        if self.there is not None:
            await self.there(params.url)
        return await super().__call__(context, params)

    async def notice(self, message: object) -> None:
        if isinstance(message, ElicitCompleteNotification):
            self.complete.append(message.params.elicitation_id)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    return warden(tmp_path, monkeypatch)


def warden(folder: Path, monkeypatch: pytest.MonkeyPatch, more: str = "") -> Context:
    """Return a context whose policy allows approval at a terminal and on the page only."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("gpuwarden.lifecycle.monitoring.wait.MAX_WAIT_S", WAIT_S)
    (folder / "policy.toml").write_text(POLICY.replace(', "elicitation"', "") + more)
    return quick_warden(folder / "home")


@contextmanager
def page(ctx: Context, public: str = "") -> Iterator[Serving]:
    """Run `gpuwarden serve` on a context's ledger, without a watch."""
    with listening(ctx) as (parts, _), recorded(ctx.home, parts.settings.local_url, public):
        yield parts


@asynccontextmanager
async def door(parts: Serving, name: str, mode: str, person: Opener | None) -> AsyncIterator[Talk]:
    """Connect the SDK's client to the running server, or start a separate server over stdio."""
    more: dict[str, Any] = {"mode": mode, "elicitation_callback": person}
    if person is not None:
        more["message_handler"] = person.notice
    if name == "http":
        async with (
            httpx2.AsyncClient(headers=bearer(parts, "read", "submit", name=next(NAMES)), timeout=300) as http,
            Client(transport(parts, http), **more) as client,  # type: ignore[arg-type]
        ):
            yield Talk(client)
        return
    env = environment(parts.ctx.home)
    python, *words = warm()
    command = StdioServerParameters(command=python, args=[*words, "-c", STDIO], env=env, cwd=str(Path.cwd()))
    async with Client(command, **more) as client:
        yield Talk(client)


def approving(parts: Serving) -> Opening:
    """Return a user who opens a URL in the browser and approves there, with a code from a terminal."""

    async def there(url: str) -> None:
        base, ticket = parts.settings.local_url, url.rpartition("/")[2]
        headers = {"origin": base, "sec-fetch-site": "same-origin"}
        async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60) as http:
            assert (await http.get(url)).status_code == 401, "the URL itself admits nobody"
            assert (await http.get(f"/enter?link={parts.tokens.create_link()}")).status_code == 200
            code = await coded(parts.ctx, ticket, await mark_of(http, ticket))
            body = {"digest": await shown_digest(http, ticket), "code": code}
            assert (await http.post(f"{url}/code.json", json=body)).json()["ok"]

    return there


DOORS = [
    *(pytest.param("stdio", mode, marks=pytest.mark.prove) for mode in ERAS),
    *(("http", mode) for mode in ERAS),
]


# ------------------------------------------------------------------------------------------------------ teardown


@pytest.mark.attack("page", "A client accepts every question for its user, who never decides")
@pytest.mark.parametrize(("name", "mode"), DOORS)
async def test_only_the_page_decides_and_the_tool_reports_the_decision(ctx: Context, name: str, mode: str) -> None:
    async with talking(ctx, mode=mode) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
    with page(ctx) as parts:
        for answer in (DECLINE, ACCEPT):
            person = Opener(answer)
            async with door(parts, name, mode, person) as talk:
                assert talk.client.protocol_version == ERAS[mode]
                for _ in range(2):
                    body = await talk.call("teardown_request", **ask)
                    assert body["code"] == "approval_required" and body["ok"], answer
            assert [p.url for p in person.params] == [f"{parts.settings.local_url}/approve/{body['ticket']}"]
            assert person.complete == [] and metering(ctx)
            assert not ctx.ledger.events(kind="approval.granted") and not ctx.ledger.events(kind="approval.declined")
            await withdraw(ctx, body["ticket"], "the next one is asked about it as well")
        person = Opener(ACCEPT, approving(parts))
        async with door(parts, name, mode, person) as talk:
            body = await talk.call("teardown_request", **ask)
            assert body["code"] in {"executing", "verified_stopped"}, body
            await talk.until("teardown_request", {"verified_stopped"}, **ask)
    (asked,) = person.params
    assert asked.url.endswith(f"/approve/{body['ticket']}") and not metering(ctx)
    legacy = mode == "legacy"
    assert (asked.elicitation_id is not None) is legacy and person.complete == [asked.elicitation_id] * legacy
    (granted,) = [event.body for event in ctx.ledger.events(kind="approval.granted")]
    assert granted["channel"] == "page" and "code" in granted["by"], "the channel that decided, not the client"


@pytest.mark.parametrize("mode", ERAS)
async def test_a_call_waits_for_a_decision_after_the_page_was_opened(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("gpuwarden.lifecycle.monitoring.wait.MAX_WAIT_S", 600.0)
    async with talking(ctx, mode=mode) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
    with page(ctx) as parts:
        async with anyio.create_task_group() as later:

            async def decide(url: str) -> None:
                await approving(parts)(url)

            async def opened(url: str) -> None:
                later.start_soon(decide, url)  # the client answers at once

            person = Opener(ACCEPT, opened)
            async with door(parts, "http", mode, person) as talk:
                body = await talk.call("teardown_request", **ask)
    assert body["code"] in {"executing", "verified_stopped"} and len(person.params) == 1
    assert len(ctx.ledger.events(kind="approval.granted")) == 1


@pytest.mark.attack("page", "A client replays its answer, forges one, or sends it with another request")
async def test_a_replayed_answer_changes_nothing(ctx: Context) -> None:
    async with talking(ctx) as talk:
        jobs = [await talk.proven(), await talk.proven(args=["again"])]
    first, second = [{"job_id": job, "verb": "terminate"} for job in jobs]
    with page(ctx) as parts:
        async with door(parts, "http", MODERN, Opener()) as talk:
            call = talk.client.session.call_tool
            asked = await call("teardown_request", first, allow_input_required=True)
            assert isinstance(asked, InputRequiredResult) and asked.input_requests
            answers: Any = dict.fromkeys(asked.input_requests, ACCEPT)
            state: dict[str, Any] = {"input_responses": answers, "request_state": asked.request_state}
            early = await call("teardown_request", first, allow_input_required=True, **state)
            assert early.structured_content["code"] == "approval_required" and metering(ctx)
            (params,) = (request.params for request in asked.input_requests.values())
            assert isinstance(params, ElicitRequestURLParams)
            await approving(parts)(params.url)
            for _ in range(3):
                await call("teardown_request", first, allow_input_required=True, **state)
            for forged in (state, {**state, "request_state": "v1.forged"}):
                with pytest.raises(MCPError):
                    await call("teardown_request", second, allow_input_required=True, **forged)
            bare = await call("teardown_request", second, allow_input_required=True, input_responses=answers)
            assert isinstance(bare, InputRequiredResult), "an answer to a question that was never asked"
    assert len(ctx.ledger.events(kind="approval.used")) == len(ctx.ledger.events(kind="approval.granted")) == 1
    assert len(ctx.ledger.events(kind="lease.stopping")) == 1 and metering(ctx)


# ---------------------------------------------------------------------------------------------------- spending


@pytest.mark.parametrize(("name", "mode"), DOORS)
async def test_spending_approved_on_the_page_launches_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    ctx = warden(tmp_path, monkeypatch, "[rehearsal_caps]\nper_job_usd = 0\n")
    with page(ctx) as parts:
        person = Opener()
        async with door(parts, name, mode, person) as talk:
            dry = await talk.call("submit_job", **JOB, dry_run=True)
            assert dry["code"] == "approval_required" and person.params == [], "a price alone asks nothing"
            waits = await talk.call("submit_job", **JOB)
            assert waits["code"] == "approval_required" and len(person.params) == 1
            late = await talk.call("submit_job", receipt=waits["receipt"])
            assert late["code"] == "approval_required" and len(person.params) == 1, "the same question"
            assert not ctx.ledger.events(kind="job.accepted")
            person.there = approving(parts)
            checked = await talk.call("submit_job", **JOB)
            assert checked["code"] == "checked" and checked["receipt"] not in {waits["receipt"], dry["receipt"]}
            assert [step["action"] for step in checked["next"]] == ["submit"] and checked["receipt"] in checked["hint"]
            assert person.params[-1].url.endswith(f"/approve/{checked['receipt']}")
            assert not ctx.ledger.events(kind="job.accepted"), "a check launches nothing"
            for code in ("accepted", "adopted"):
                assert (await talk.call("submit_job", receipt=checked["receipt"]))["code"] == code
    assert len(person.params) == 2 and len(ctx.ledger.events(kind="job.accepted")) == 1


async def test_launch_waiting_for_the_page_continues_after_approval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = warden(tmp_path, monkeypatch, "[rehearsal_caps]\nper_job_usd = 0\n")

    async def at_terminal(url: str) -> None:
        grant_spending(ctx, open_spending(ctx, url.rpartition("/")[2]), "terminal", "user x")

    with page(ctx) as parts:
        async with door(parts, "http", MODERN, None) as talk:
            receipt = (await talk.call("submit_job", **JOB))["receipt"]
        async with door(parts, "http", MODERN, Opener(DECLINE, at_terminal)) as talk:
            assert (await talk.call("submit_job", receipt=receipt))["code"] == "accepted", "the ledger counts"


# -------------------------------------------------------------------------------------- clients that are asked


@pytest.mark.parametrize(("name", "mode"), DOORS)
async def test_a_client_without_the_capability_sees_no_difference(ctx: Context, name: str, mode: str) -> None:
    async with talking(ctx, mode=mode) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
        before = await talk.call("teardown_request", **ask)
    with page(ctx) as parts:
        async with door(parts, name, mode, None) as talk:
            after = await talk.call("teardown_request", **ask)
    cost = {"meter": None}
    assert before | cost == after | cost


@pytest.mark.parametrize(("declared", "asks"), [({}, False), ({"form": {}}, False), ({"url": {}}, True)])
async def test_only_clients_that_open_urls_are_asked(ctx: Context, declared: dict[str, Any], asks: bool) -> None:
    async with talking(ctx) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
    meta = envelope() | {"io.modelcontextprotocol/clientCapabilities": {"elicitation": declared}}
    params = {"name": "teardown_request", "arguments": ask, "_meta": meta}
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": "teardown_request"}
    with page(ctx) as parts:
        async with httpx2.AsyncClient(headers=bearer(parts, "read", "submit") | JSON | headers, timeout=60) as http:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            text = (await http.post(f"{parts.settings.local_url}/mcp", json=body)).text
    result = json.loads(text[text.index("{") :])["result"]
    assert ("inputRequests" in result) is asks is ("structuredContent" not in result)
    assert "gwt_" not in text and "link=" not in text


@pytest.mark.parametrize("mode", ERAS)
async def test_terminal_is_named_without_a_page_or_its_channel(ctx: Context, mode: str) -> None:
    person = Opener()
    async with talking(ctx, person, mode) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
        none = await talk.call("teardown_request", **ask)
    file = ctx.home.parent / "policy.toml"
    file.write_text(file.read_text().replace('"terminal", "page"', '"terminal"'))
    with page(ctx) as parts:
        async with door(parts, "http", mode, person) as talk:
            closed = await talk.call("teardown_request", **ask)
    assert none["code"] == closed["code"] == "approval_required" and none["ticket"] in closed["hint"]
    assert person.params == []


async def test_remote_client_gets_the_public_address(ctx: Context) -> None:
    async with talking(ctx) as talk:
        ask = {"job_id": await talk.proven(), "verb": "terminate"}
    for name, base in (("http", "https://gpu.example"), ("stdio", "")):
        person = Opener(DECLINE)
        with page(ctx, "https://gpu.example") as parts:
            async with door(parts, name, MODERN, person) as talk:
                body = await talk.call("teardown_request", **ask)
        assert [p.url for p in person.params] == [f"{base or parts.settings.local_url}/approve/{body['ticket']}"]
