"""A job's events over real sockets, as server-sent events or a WebSocket: a client that reconnects loses nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from doors import quick_warden
from gpuwarden.core.errors import LedgerError
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.http import running
from gpuwarden.interfaces.http.contract import events as contract
from gpuwarden.interfaces.http.contract import live
from gpuwarden.interfaces.http.contract.live import MAX_WAITING, Live
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.job_tokens import job_token
from gpuwarden.ledger.events import JobAccepted, JobCanceled
from gpuwarden.lifecycle.context import Context
from gpuwarden.metrics.points import PostedPoints, Row, read_alert
from gpuwarden.metrics.store import Batch
from http_kit import bearer, listening
from load_kit import served
from waiting import PATIENCE

pytestmark = pytest.mark.anyio
Kind = Literal["sse", "websocket"]
Next = Callable[[], Awaitable[dict[str, Any]]]
KINDS: tuple[Kind, ...] = ("sse", "websocket")
PATH = "/api/jobs/j1/events"


class Ended(Exception):
    """The server ended the stream, or the connection broke."""


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    for job in ("j1", "j2"):
        ctx.ledger.add(f"job/{job}", JobAccepted(spec=JobSpec(platform="local", command=("true",))))
    return ctx


@asynccontextmanager
async def followed(kind: Kind, port: int, headers: dict[str, str], after: str = "") -> AsyncIterator[Next]:
    """Follow j1 with an independent client. Yields a function that returns the next event or raises Ended.

    Raises PermissionError if the server refuses the client.
    """
    if kind == "websocket":
        target = f"ws://localhost:{port}{PATH}" + (f"?after={after}" if after else "")
        try:
            async with connect(target, additional_headers=headers, proxy=None) as line:

                async def message() -> dict[str, Any]:
                    try:
                        return json.loads(await line.recv())  # type: ignore[no-any-return]
                    except ConnectionClosed as closed:
                        raise Ended(str(closed.rcvd.code if closed.rcvd else "")) from closed

                yield message
        except InvalidStatus as refused:
            raise PermissionError(refused.response.status_code) from refused
        return
    headers = headers | ({"Last-Event-ID": after} if after else {})
    async with (
        httpx2.AsyncClient(timeout=30 * PATIENCE) as http,
        http.stream("GET", f"http://localhost:{port}{PATH}", headers=headers) as answer,
    ):
        if answer.status_code != 200:
            raise PermissionError(answer.status_code)
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()

        async def event() -> dict[str, Any]:
            try:
                async for text in lines:
                    if text.startswith("data: "):
                        return json.loads(text.removeprefix("data: "))  # type: ignore[no-any-return]
            except httpx2.TransportError as broken:
                raise Ended("") from broken
            raise Ended("1000")

        yield event


def alert(ctx: Context, *numbers: int, text: str = "") -> None:
    """Store distinct alerts for j1."""
    body = {"type": "timeout_warning", "job_id": "j1", "error_message": text}
    ctx.metrics.write(Batch(alerts=[read_alert({**body, "current_step": n}, float(n)) for n in numbers]))


async def steps(following: Next, count: int) -> list[int]:
    """Return the numbers of the next `count` alerts."""
    found: list[int] = []
    while len(found) < count:
        event = await following()
        found += [event["body"]["current_step"]] if event["type"] == "alert" else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_reconnecting_client_continues_where_it_stopped(ctx: Context, kind: Kind) -> None:
    with listening(ctx) as (parts, port):
        headers = bearer(parts, "read")
        async with followed(kind, port, headers) as following:
            assert (await following())["type"] == "state"
            alert(ctx, 1)
            seen = await following()
            assert (seen["type"], seen["alert"], seen["body"]["current_step"]) == ("alert", "timeout_warning", 1)
        alert(ctx, *range(2, 700))  # more than one poll may queue
        ctx.ledger.add("job/j1", JobCanceled())
        ctx.metrics.write(Batch([PostedPoints("j1", (Row("loss", 7, 1, float("nan")),))]))
        async with followed(kind, port, headers, after=seen["id"]) as following:
            assert (await following())["state"] == "canceled"
            news = [await following()]
            while sum(event["type"] == "alert" for event in news) < 698:
                news.append(await following())
            assert [e["body"]["current_step"] for e in news if e["type"] == "alert"] == [*range(2, 700)]
            assert [e["state"] for e in news if e["type"] == "event"] == ["canceled"]
            metrics = [e["metrics"] for e in news if e["type"] == "metrics"]
            assert metrics == [{"loss": {"step": 7, "at": 1e-06, "value": "nan"}}]
        async with followed(kind, port, headers, after="999999999.999999999") as following:
            await following()
            alert(ctx, 700)
            assert await steps(following, 1) == [700], "a place of another ledger hides nothing"


async def test_queue_emptied_during_a_poll_gets_all_alerts(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next poll returns the rest of a truncated query, even if nothing is written in between."""
    live, stored, taken = Live(ctx), ctx.metrics.alerts, 0

    def emptied(job_id: str, after: int, limit: int) -> Any:
        nonlocal taken
        found = stored(job_id, after, limit)
        taken += sum(event["type"] == "alert" for event in one.events)
        one.events = []
        return found

    monkeypatch.setattr(ctx.metrics, "alerts", emptied)
    with live.following("j1") as one:
        alert(ctx, *range(MAX_WAITING + 10))
        for _ in range(3):
            await live.look()
        taken += sum(event["type"] == "alert" for event in one.events)
    assert taken == MAX_WAITING + 10


async def test_a_poll_that_fails_is_repeated(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    live, stored, fails = Live(ctx), ctx.metrics.alerts, [LedgerError("the disk failed", "Try again.")]

    def broken(*args: Any) -> Any:
        if fails:
            raise fails.pop()
        return stored(*args)

    monkeypatch.setattr(ctx.metrics, "alerts", broken)
    async with live.running():
        with live.following("j1") as one:
            alert(ctx, 1)
            news: list[dict[str, Any]] = []
            with anyio.fail_after(30 * PATIENCE):
                while not any(event["type"] == "alert" for event in news):
                    news += await one.take()
    assert not fails


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
async def test_killed_server_loses_no_stream_events(tmp_path: Path, ctx: Context, kind: Kind) -> None:
    home = tmp_path / "home"
    headers = {"Authorization": f"Bearer {TokenStore(ctx.home, ctx.clock).create('viewer', ['read'], 1)[1]}"}
    with served(home) as (process, port):
        async with followed(kind, port, headers) as following:
            await following()
            alert(ctx, 1)
            place = (await following())["id"]
            process.kill()
            with pytest.raises(Ended):
                await following()
    alert(ctx, 2)  # while no server is running
    with served(home, port):
        async with followed(kind, port, headers, after=place) as following:
            alert(ctx, 3)
            assert await steps(following, 2) == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
async def test_stopping_server_closes_its_streams_properly(ctx: Context, kind: Kind) -> None:
    entered, left = anyio.Event(), anyio.Event()
    told: list[str] = []

    async def one(port: int, headers: dict[str, str]) -> None:
        async with followed(kind, port, headers) as following:
            await following()
            entered.set()
            with pytest.raises(Ended) as ended:
                await following()
            told.append(str(ended.value))
        left.set()

    async with anyio.create_task_group() as tasks:
        server = listening(ctx)
        parts, port = server.__enter__()
        tasks.start_soon(one, port, bearer(parts, "read"))
        await entered.wait()
        await anyio.to_thread.run_sync(server.__exit__, None, None, None)
        await left.wait()
    assert told[0] in {"websocket": {"1001", "1012"}, "sse": {"1000"}}[kind], (
        "going away, restarting, or a whole answer"
    )


@pytest.mark.attack("http", "follows a job with no token, another's, a job's own key, or from another page")
@pytest.mark.parametrize("kind", KINDS)
async def test_only_authorized_readers_can_follow(ctx: Context, kind: Kind) -> None:
    with listening(ctx) as (parts, port):
        read = bearer(parts, "read")
        for headers in (
            {},
            {"Authorization": "Bearer gwt_" + "A" * 43},
            {"X-API-Key": job_token(ctx.home, "j1", "alerts")},
            {"Authorization": f"Bearer {job_token(ctx.home, 'j2', 'metrics')}"},
            bearer(parts, "submit", name="only-submits"),
            read | {"Origin": "http://evil.example"},
            read | {"Origin": "http://localhost:1"},
        ):
            with pytest.raises(PermissionError):
                async with followed(kind, port, headers):
                    pass
        async with followed(kind, port, read) as following:
            assert (await following())["type"] == "state"


@pytest.mark.attack("http", "opens many streams at once with one token")
@pytest.mark.parametrize(("kind", "refusal"), [("sse", 503), ("websocket", 403)])
async def test_simultaneous_streams_beyond_the_limit_are_refused(
    ctx: Context, kind: Kind, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_EACH", 2)
    answers: list[int] = []
    answered = anyio.Event()

    async def one(port: int, headers: dict[str, str]) -> None:
        try:
            async with followed(kind, port, headers) as following:
                assert (await following())["type"] == "state"
                answers.append(200)
                if len(answers) == 8:
                    answered.set()
                await answered.wait()
        except PermissionError as refused:
            answers.append(refused.args[0])
            if len(answers) == 8:
                answered.set()

    with listening(ctx) as (parts, port):
        headers = bearer(parts, "read")
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one, port, headers)
    assert sorted(answers) == sorted([200, 200, *[refusal] * 6])


@pytest.mark.slow
@pytest.mark.attack("http", "keeps a stream of events open after its token was revoked")
@pytest.mark.parametrize("kind", KINDS)
async def test_revoked_token_ends_only_its_own_stream(
    ctx: Context, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.http.serving.RECHECK_S", 0.05)
    with listening(ctx) as (parts, port):
        gone, stays = bearer(parts, "read", name="gone"), bearer(parts, "read", name="stays")
        async with followed(kind, port, gone) as one, followed(kind, port, stays) as other:
            await one(), await other()
            parts.tokens.revoke("gone")
            with pytest.raises(Ended):
                await one()
            alert(ctx, 1)
            assert await steps(other, 1) == [1]


@pytest.mark.slow
@pytest.mark.attack("http", "opens a stream of events and never reads it")
@pytest.mark.parametrize("kind", KINDS)
async def test_client_that_does_not_read_is_dropped_without_delaying_others(
    ctx: Context, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = running.listen

    def narrow(host: str, port: int) -> socket.socket:
        made = listen(host, port)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # the kernel buffers little for a client
        return made

    monkeypatch.setattr(running, "listen", narrow)
    monkeypatch.setattr(contract, "SEND_S", 0.3)
    with listening(ctx, send_s=0.3) as (parts, port):
        token = bearer(parts, "read")["Authorization"]
        head = f"GET {PATH}?after=0.0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: {token}\r\n"
        if kind == "websocket":
            head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            head += "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(("127.0.0.1", port))
            deaf.sendall(f"{head}\r\n".encode())
            while not parts.streams:
                await anyio.sleep(0.02)
            async with followed(kind, port, {"Authorization": token}) as following:
                alert(ctx, *range(1, 801), text="x" * 290)
                assert await steps(following, 800) == [*range(1, 801)]
                while len(parts.streams) > 1:
                    await anyio.sleep(0.02)


@pytest.mark.slow
async def test_websocket_client_messages_change_nothing(ctx: Context) -> None:
    with listening(ctx) as (parts, port):
        headers = bearer(parts, "read")
        async with connect(f"ws://localhost:{port}{PATH}", additional_headers=headers, proxy=None) as line:
            for words in ('{"type": "event"}', b"\x00\xff", "", "x" * 60_000):
                await line.send(words)
            assert json.loads(await line.recv())["type"] == "state"
            alert(ctx, 1)
            assert json.loads(await line.recv())["body"]["current_step"] == 1
            await line.send("x" * 70_000)
            with pytest.raises(ConnectionClosed) as closed:
                await line.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert len(ctx.ledger.events("job/j1")) == 1
