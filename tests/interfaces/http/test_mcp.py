"""A job's whole lifecycle over HTTP, in both protocol eras, with a real client and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp.client.client import Client

from doors import quick_warden
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.lifecycle.context import Context
from http_kit import JSON, MODERN, bearer, client, envelope, listening, opened, serving, transport
from talk_kit import ERAS, TOOLS, Person, Talk, metering, says
from waiting import soon

pytestmark = pytest.mark.anyio


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    return quick_warden(tmp_path / "home")


@pytest.mark.prove
@pytest.mark.parametrize("mode", ERAS)
async def test_lifecycle_over_http_ends_with_an_approval_by_elicitation(ctx: Context, mode: str) -> None:
    person = Person(says(True))
    with listening(ctx) as (parts, _):
        headers = bearer(parts, "read", "submit", name="laptop")
        async with (
            httpx2.AsyncClient(headers=headers, timeout=300) as http,
            Client(transport(parts, http), mode=mode, elicitation_callback=person) as client,  # type: ignore[arg-type]
        ):
            assert client.protocol_version == ERAS[mode]
            assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS
            talk = Talk(client)
            job_id = await talk.proven()
            await talk.until("teardown_request", {"verified_stopped"}, job_id=job_id, verb="terminate")
    assert len(person.asked) == 1 and not metering(ctx)
    (granted,) = [e.body for e in quick_warden(ctx.home).ledger.events(kind="approval.granted")]
    assert granted["channel"] == "elicitation" and "laptop" in granted["by"]


@pytest.mark.slow
async def test_many_clients_of_both_eras_share_one_server(ctx: Context) -> None:
    with listening(ctx) as (parts, _):
        headers = bearer(parts, "read")

        async def one(mode: str) -> None:
            async with (
                httpx2.AsyncClient(headers=headers, timeout=300) as http,
                Client(transport(parts, http), mode=mode) as client,  # type: ignore[arg-type]
            ):
                assert (await Talk(client).call("list_instances"))["ok"] is True

        async with anyio.create_task_group() as tasks:
            for mode in [*ERAS] * 5:
                tasks.start_soon(one, mode)


@contextmanager
def listening_stream(parts: Serving, headers: dict[str, str]) -> Iterator[Iterator[str]]:
    """Open a stream of changes, and yield the text that follows the acknowledgment."""
    listen = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen"}
    params = {"notifications": {"resourcesListChanged": True}, "_meta": envelope()}
    headers = headers | JSON | {"MCP-Protocol-Version": MODERN, "Mcp-Method": "subscriptions/listen"}
    with (
        httpx2.Client(headers=headers, timeout=300) as http,
        http.stream("POST", f"{parts.settings.local_url}/mcp", json=listen | {"params": params}) as answer,
    ):
        blocks = answer.iter_text()
        assert "acknowledged" in next(blocks)
        yield blocks


async def test_stopping_server_closes_its_open_streams_at_once(ctx: Context, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        with listening(ctx) as (parts, _):
            blocks = stack.enter_context(listening_stream(parts, bearer(parts, "read")))
        assert list(blocks) == [], "the stream ends as a stream does, not with a broken line"
    assert parts.mcp.server.live._listeners == {} and parts.streams == {}
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


@pytest.mark.attack("http", "keeps a stream open after its token was revoked")
async def test_a_stream_ends_when_its_token_is_revoked(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.http.serving.RECHECK_S", 0.05)
    with listening(ctx) as (parts, _):
        gone, stays = bearer(parts, "read", name="gone"), bearer(parts, "read", name="stays")
        with listening_stream(parts, gone) as blocks, listening_stream(parts, stays):
            parts.tokens.revoke("gone")
            assert list(blocks) == []
            assert len(parts.streams) == 1, "the other stream goes on"


async def session(http: httpx2.AsyncClient, headers: dict[str, str]) -> dict[str, str]:
    """Open a session in the older protocol, and return the headers for its requests."""
    answer = await http.post("/mcp", json=opened(), headers=headers)
    assert answer.status_code == 200, answer.text
    return headers | {"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"}


@pytest.mark.parametrize("revision", [{}, *({"MCP-Protocol-Version": one} for one in ERAS.values())], ids=str)
async def test_a_get_without_a_session_is_405(ctx: Context, revision: dict[str, str]) -> None:
    async with serving(ctx) as parts, client(parts, JSON | revision) as http:
        answer = await http.get("/mcp", headers=bearer(parts, "read"))
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def ping(http: httpx2.AsyncClient, headers: dict[str, str]) -> int:
    """Return the HTTP status of a ping in a session."""
    return (await http.post("/mcp", json={"jsonrpc": "2.0", "id": 2, "method": "ping"}, headers=headers)).status_code


@pytest.mark.attack("http", "opens sessions until no other client gets one")
async def test_session_limit_closes_only_the_tokens_own_idlest_session(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.mcp.over_http.MAX_SESSIONS_EACH", 3)
    async with serving(ctx) as parts, client(parts, JSON) as http:
        mine, other = bearer(parts, "read", name="mine"), await session(http, bearer(parts, "read", name="other"))
        first, second, third = [await session(http, mine) for _ in range(3)]
        assert await ping(http, first) == 200, "used again, it is not the idlest"
        fourth = await session(http, mine)
        await soon(lambda: len(parts.mcp._manager._server_instances) == 4)  # type: ignore[union-attr]
        assert [await ping(http, one) for one in (first, second, third, fourth, other)] == [200, 404, 200, 200, 200]


@pytest.mark.attack("http", "keeps a session open after its token was revoked")
async def test_sessions_end_when_their_token_is_revoked(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.http.serving.RECHECK_S", 0.05)
    async with serving(ctx) as parts, client(parts, JSON) as http:
        await session(http, bearer(parts, "read", name="gone"))
        stays = await session(http, bearer(parts, "read", name="stays"))
        parts.tokens.revoke("gone")
        await soon(lambda: len(parts.mcp._manager._server_instances) == 1)  # type: ignore[union-attr]
        assert await ping(http, stays) == 200


@pytest.mark.attack("http", "opens streams until no other client gets a connection")
async def test_a_token_has_a_limited_number_of_streams(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.http.mcp_routes.MAX_STREAMS_EACH", 1)
    with listening(ctx) as (parts, _):
        mine, other = bearer(parts, "read", name="mine"), bearer(parts, "read", name="other")
        with listening_stream(parts, mine):
            async with httpx2.AsyncClient(base_url=parts.settings.local_url, headers=JSON, timeout=300) as http:
                assert (await http.post("/mcp", json=opened(), headers=mine)).status_code == 503
                assert (await http.post("/mcp", json=opened(), headers=other)).status_code == 200


async def test_trailing_slash_does_not_redirect(ctx: Context) -> None:
    async with serving(ctx) as parts, client(parts, bearer(parts, "read") | JSON) as http:
        answer = await http.post("/mcp/", json=opened())
        assert answer.status_code == 404 and "location" not in answer.headers
