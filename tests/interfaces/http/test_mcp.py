"""The whole life of a job over HTTP, in both eras, with a real client and a real server."""

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
from http_kit import JSON, MODERN, bearer, envelope, listening, transport
from talk_kit import ERAS, TOOLS, Person, Talk, metering, says

pytestmark = pytest.mark.anyio


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    return quick_warden(tmp_path / "home")


@pytest.mark.prove
@pytest.mark.parametrize("mode", ERAS)
async def test_a_life_over_http_ends_with_a_yes_that_the_client_claims(ctx: Context, mode: str) -> None:
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
    """Open a stream of changes, and yield what it says after it was acknowledged."""
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


async def test_a_server_that_ends_closes_its_open_streams_at_once(
    ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
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
