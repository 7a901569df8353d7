"""Notifications and completions for a client: changes of a job's resource, alerts as log messages, and names."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated
from mcp_types import PromptReference, ResourceTemplateReference, ResourceUpdatedNotification

from doors import JOB, quick_warden
from gpuwarden.core.errors import LedgerError
from gpuwarden.core.models import JobSpec
from gpuwarden.interfaces.mcp import live
from gpuwarden.interfaces.mcp.live import JOB_TEMPLATE, job_uri
from gpuwarden.interfaces.mcp.resources import ENTRY_TEMPLATE, FILLED_URI, PROFILE_TEMPLATE
from gpuwarden.interfaces.mcp.server import WardenServer, make_server
from gpuwarden.ledger.events import AlertRaised
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.submission.submit import submit
from http_kit import bearer, listening

pytestmark = pytest.mark.anyio
ERAS = ["legacy", "2026-07-28"]
OVER = ["memory", "http"]


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "EVERY_S", 0.02)
    return quick_warden(tmp_path / "home")


async def launched(ctx: Context, name: str = "tiny") -> str:
    """Launch a job, and return its id. The job may end at any moment."""
    spec = JobSpec.model_validate({**JOB, "name": name, "args": [name]})
    checked = await submit(ctx, spec)
    done = await submit(ctx, spec, receipt=checked.receipt)
    assert done.job is not None
    return done.job.id


@asynccontextmanager
async def talking(ctx: Context, over: str, mode: str, **handlers: Any) -> AsyncIterator[Client]:
    """Connect a client in memory, or to a real server over HTTP."""
    if over == "http":
        with listening(ctx) as (parts, port):
            async with httpx2.AsyncClient(headers=bearer(parts, "read", "submit"), timeout=300) as http:
                transport = streamable_http_client(f"http://localhost:{port}/mcp", http_client=http)
                async with Client(transport, mode=mode, **handlers) as client:
                    yield client
        return
    server: WardenServer = make_server(ctx)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.live.run)
        async with Client(server, mode=mode, **handlers) as client:
            yield client
        tasks.cancel_scope.cancel()


def moves(ctx: Context, job_id: str) -> None:
    """Let another process record something about a job."""
    other = quick_warden(ctx.home)
    other.ledger.add(f"job/{job_id}", AlertRaised(condition="idle", mark="", text="the GPU idles"))
    other.ledger.close()


# ------------------------------------------------------------------------------------------------ a job's resource


@pytest.mark.slow
@pytest.mark.parametrize("mode", ERAS)
async def test_job_is_a_listed_resource_and_unknown_jobs_are_errors(ctx: Context, mode: str) -> None:
    job_id = await launched(ctx)
    async with Client(make_server(ctx), mode=mode) as client:
        listed = {r.uri: r for r in (await client.list_resources()).resources}
        assert listed[job_uri(job_id)].mime_type == "application/json"
        (content,) = (await client.read_resource(job_uri(job_id))).contents
        body = json.loads(content.text)  # type: ignore[union-attr]
        assert body["job_id"] == job_id and body["platform"] == JOB["platform"] and body["billing"] in {True, False}
        for unknown in (job_uri("j-unknown"), job_uri("..%2f..%2fetc"), "gpuwarden://jobs/"):
            with pytest.raises(MCPError):
                await client.read_resource(unknown)


@pytest.mark.slow
@pytest.mark.parametrize("over", OVER)
async def test_older_client_is_notified_of_changes_while_subscribed(ctx: Context, over: str) -> None:
    job_id, heard = await launched(ctx), list[str]()
    told = anyio.Event()

    async def note(message: Any) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            heard.append(str(message.params.uri))
            told.set()

    async with talking(ctx, over, "legacy", message_handler=note) as client:
        assert client.server_capabilities.resources is not None and client.server_capabilities.resources.subscribe
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated in the newer era, but the older one uses it
            await client.subscribe_resource(job_uri(job_id))
            await anyio.sleep(0.3 if over == "http" else 0)  # the message stream opens in parallel with the calls
            while not told.is_set():
                moves(ctx, job_id)
                with anyio.move_on_after(0.5):
                    await told.wait()
            await client.unsubscribe_resource(job_uri(job_id))
            await anyio.sleep(0.1)
            count = len(heard)
            moves(ctx, job_id)
            await anyio.sleep(0.2)
        assert set(heard) == {job_uri(job_id)} and len(heard) == count


@pytest.mark.slow
@pytest.mark.parametrize("over", OVER)
async def test_newer_client_that_listens_is_notified_of_changes(ctx: Context, over: str) -> None:
    job_id = await launched(ctx)
    async with (
        talking(ctx, over, "2026-07-28") as client,
        client.listen(resource_subscriptions=[job_uri(job_id)]) as stream,
    ):
        moves(ctx, job_id)
        assert await anext(aiter(stream)) == ResourceUpdated(job_uri(job_id))


async def test_changes_between_a_subscription_and_the_first_poll_are_reported(ctx: Context) -> None:
    jobs, changed = live.LiveJobs(ctx), anyio.Event()
    moves(ctx, "j-before")
    jobs.subscribe(lambda event: changed.set() if event == ResourceUpdated(job_uri("j-after")) else None)
    moves(ctx, "j-after")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(jobs.run)
        await changed.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_alert_reaches_only_clients_whose_log_level_allows_warnings(ctx: Context) -> None:
    job_id, heard = await launched(ctx), list[Any]()
    told = anyio.Event()

    async def note(message: Any) -> None:
        heard.append(message)
        told.set()

    async with talking(ctx, "memory", "legacy", logging_callback=note) as client:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await client.set_logging_level("error")
            moves(ctx, job_id)
            await anyio.sleep(0.2)
            assert heard == []
            await client.set_logging_level("info")
            moves(ctx, job_id)
            await told.wait()
    assert heard[0].level == "warning" and "the GPU idles" in heard[0].data


async def test_temporary_ledger_error_does_not_end_live_updates(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, looks = live.LiveJobs(ctx), list[int]()
    heard = anyio.Event()
    jobs.subscribe(lambda _event: heard.set())

    def events(*, after: int, limit: int) -> list[Any]:
        looks.append(after)
        if len(looks) == 1:
            raise LedgerError("the disk is full")
        jobs.changed("j-1")
        return []

    monkeypatch.setattr(ctx.ledger, "events", events)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(jobs.run)
        await heard.wait()
        tasks.cancel_scope.cancel()


async def test_subscriptions_are_limited_and_cleared_on_disconnect(ctx: Context) -> None:
    server = make_server(ctx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        async with Client(server, mode="legacy") as client:
            for n in range(live.MAX_SUBSCRIPTIONS):
                await client.subscribe_resource(f"gpuwarden://jobs/{n}")
            with pytest.raises(MCPError):
                await client.subscribe_resource("gpuwarden://jobs/more")
            await client.unsubscribe_resource("gpuwarden://jobs/1")
            with pytest.raises(MCPError):
                await client.subscribe_resource("gpuwarden://jobs/" + "x" * 3_000)
            assert len(server.live._subscribed) == 1
    assert server.live._subscribed == {} and server.live._levels == {}


# ----------------------------------------------------------------------------------------------------- completions


@pytest.mark.slow
@pytest.mark.parametrize("mode", ERAS)
async def test_argument_values_are_completed(ctx: Context, mode: str) -> None:
    jobs = [await launched(ctx, "first-run"), await launched(ctx, "second-run")]

    def prompt(name: str) -> PromptReference:
        return PromptReference(type="ref/prompt", name=name)

    def template(uri: str) -> ResourceTemplateReference:
        return ResourceTemplateReference(type="ref/resource", uri=uri)

    async with Client(make_server(ctx), mode=mode) as client:

        async def values(ref: Any, argument: str, typed: str) -> list[str]:
            found = await client.complete(ref, {"name": argument, "value": typed})
            return found.completion.values

        for ref in (prompt("debug_run"), prompt("finish_run"), template(JOB_TEMPLATE)):
            assert await values(ref, "job_id", "") == jobs[::-1], "the latest first"
            assert await values(ref, "job_id", jobs[0]) == jobs[:1]
            assert await values(ref, "job_id", "SECOND") == jobs[1:]
        assert "runpod" in await values(prompt("start_training_run"), "platform", "run")
        assert "rehearsal/vastai" in await values(prompt("start_training_run"), "platform", "rehearsal/v")
        assert await values(template(PROFILE_TEMPLATE), "name", "lam") == ["lambda"]
        assert "OOM-001" in await values(template(ENTRY_TEMPLATE), "id", "oom")
        assert "sft" in await values(template(FILLED_URI), "name", "s")
        for ref, argument in ((prompt("start_training_run"), "goal"), (prompt("nothing"), "x"), (template("x"), "y")):
            assert await values(ref, argument, "a" * 5_000) == []
        everything = await client.complete(template(ENTRY_TEMPLATE), {"name": "id", "value": ""})
        assert len(everything.completion.values) <= 100
        assert everything.completion.total is not None and everything.completion.total >= len(
            everything.completion.values
        )
