"""Waits for a job as tasks: the clients that get one, how it ends, and the protocol's own tasks client."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp.client.client import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_REQUIRED_CLIENT_CAPABILITY, CallToolResult, Result
from pydantic import ConfigDict, Field

from gpuwarden.core.models import Observation, RunnerAlert
from gpuwarden.core.states import Job
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.interfaces.mcp.tasks import TASKS
from gpuwarden.ledger import events as ev
from gpuwarden.lifecycle.records import read_job
from page_kit import World, busy_world
from talk_kit import ask

pytestmark = pytest.mark.anyio


class Started(Result):
    """A task that a call returned."""

    model_config = ConfigDict(extra="allow")
    result_type: Literal["task"] = Field(alias="resultType")
    task_id: str = Field(alias="taskId")
    status: str


class Waits(ClientExtension):
    """A client that supports tasks, and records those that it gets."""

    identifier = TASKS

    def __init__(self) -> None:
        self.started: list[Started] = []

    def claims(self) -> list[ResultClaim[Any]]:
        async def resolve(found: Started, _: ClaimContext) -> CallToolResult:
            self.started.append(found)
            return CallToolResult(content=[], is_error=True)  # an error need not match the schema

        return [ResultClaim(result_type="task", model=Started, resolve=resolve)]


async def started(client: Client, waits: Waits, **arguments: Any) -> str:
    """Call check_job, and return the id of the task that it starts."""
    before = len(waits.started)
    await client.call_tool("check_job", arguments)
    (found,) = waits.started[before:]
    assert (found.result_type, found.status) == ("task", "working")
    return found.task_id


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def client_of(world: World, *extensions: ClientExtension, mode: str = "auto") -> Client:
    return Client(make_server(world.ctx), mode=mode, extensions=list(extensions))  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return busy_world(tmp_path / "home")


async def test_wait_is_a_task_that_ends_with_the_awaited_change(world: World) -> None:
    waits = Waits()
    async with client_of(world, waits) as client:
        task = await started(client, waits, job_id="jlive", until="step", log_bytes=0)
        found = await ask(client, "tasks/get", taskId=task)
        assert (found["resultType"], found["status"], found["taskId"]) == ("complete", "working", task)
        assert "2310" in found["statusMessage"] and found["pollIntervalMs"] >= 1_000 and found["ttlMs"] is None
        assert "result" not in found and found["createdAt"].endswith("+00:00")
        world.run("jlive", 2_311, 5_000)
    async with client_of(world, Waits()) as client:  # another server on the same ledger
        found = await ask(client, "tasks/get", taskId=task)
        assert found["status"] == "completed" and found["result"]["structuredContent"]["step"] == 2_311
        assert json.loads(found["result"]["content"][0]["text"])["state"] == "running"


@pytest.mark.parametrize(
    ("until", "seen", "ends"),
    [
        ("step", {"step": 2_310}, False),
        ("alert", {"step": 2_311}, False),
        ("alert", {"alerts": (RunnerAlert(kind="stall", text="no step for 30 minutes"),)}, True),
        ("step", {"alerts": (RunnerAlert(kind="stall", text="no step for 30 minutes"),)}, True),  # no step will follow
        ("state", {"step": 2_311}, False),
        ("end", {"step": 2_311}, False),
        ("end", {"state": Job.SUCCEEDED, "exit_code": 0}, True),
        ("state", {"state": Job.SUCCEEDED, "exit_code": 0}, True),
        ("step", {"state": Job.FAILED, "exit_code": 1}, True),
    ],
)
async def test_only_the_awaited_change_ends_a_task(world: World, until: str, seen: dict[str, Any], ends: bool) -> None:
    waits = Waits()
    async with client_of(world, waits) as client:
        task = await started(client, waits, job_id="jlive", until=until)
        last = world.runs.seen["jlive"]
        world.runs.seen["jlive"] = Observation(**{**last.__dict__, **seen})
        found = await ask(client, "tasks/get", taskId=task)
        assert found["status"] == ("completed" if ends else "working")
        assert ("result" in found) is ends


@pytest.mark.parametrize(("until", "ends"), [("state", True), ("step", True), ("end", False)])
async def test_transient_state_between_polls_ends_any_task_but_until_end(world: World, until: str, ends: bool) -> None:
    waits = Waits()
    async with client_of(world, waits) as client:
        task = await started(client, waits, job_id="jlive", until=until)
        handle = read_job(world.ctx.ledger, "jlive").handle
        assert handle is not None and handle.place is not None
        resumed = (
            ev.JobSubmitting(place=handle.place),
            ev.SubmitIntent(attempt=2),
            ev.JobSubmitted(handle=handle, attempt=2),
        )
        for change in (ev.JobPaused(), *resumed):
            world.clock.advance(1)
            world.add("job/jlive", change)
        found = await ask(client, "tasks/get", taskId=task)
        assert found["status"] == ("completed" if ends else "working")
        assert "running" in (found["result"]["structuredContent"]["state"] if ends else found["statusMessage"])


async def test_ineligible_calls_and_clients_get_no_task(world: World) -> None:
    waits = Waits()
    async with client_of(world, waits) as client:
        for arguments in (
            {"job_id": "jlive"},
            {"job_id": "jfail", "until": "step"},  # it has ended
            {"job_id": "jnone", "until": "step"},
            {"job_id": "jlive", "until": "forever"},
            {"job_id": "jlive", "until": "step", "unknown": 1},
            {"job_id": "jlive", "until": "step", "log_bytes": 10**9},
            {"job_id": ["jlive"], "until": "step"},
        ):
            result = await client.call_tool("check_job", arguments)
            assert result.structured_content is not None and "code" in result.structured_content, arguments
        assert not waits.started
    undeclared: tuple[tuple[str, list[ClientExtension], int], ...] = (
        ("auto", [], MISSING_REQUIRED_CLIENT_CAPABILITY),
        ("legacy", [Waits()], METHOD_NOT_FOUND),  # the older revision defines tasks differently
    )
    for mode, extensions, code in undeclared:
        async with client_of(world, *extensions, mode=mode) as client:
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                with pytest.raises(MCPError) as error:
                    await ask(client, method, taskId=encoded("{}"))
                assert error.value.error.code == code
            result = await client.call_tool("check_job", {"job_id": "jfail", "until": "step"})
            assert result.structured_content is not None and result.structured_content["state"] == "failed"


async def test_unknown_task_is_an_error_and_canceling_a_task_keeps_the_job(world: World) -> None:
    waits = Waits()
    async with client_of(world, waits) as client:
        task = await started(client, waits, job_id="jlive", until="state")
        for method in ("tasks/cancel", "tasks/update"):
            assert (await ask(client, method, taskId=task, inputResponses={}))["resultType"] == "complete"
        body = json.loads(base64.urlsafe_b64decode(task + "=" * (-len(task) % 4)))
        forged = {**body, "asked": {**body["asked"], "job_id": "../x"}}
        late = {**body, "at": 1e300}
        many = {**body, "asked": {**body["asked"], "job_id": "f0123456789"}}
        bodies = [json.dumps(late), json.dumps(many), "[" * 2_000]
        for wrong in ("", "x", "é", "A" * 5_000, task[:-9], *map(encoded, bodies)):
            for method in ("tasks/get", "tasks/cancel", "tasks/update"):
                with pytest.raises(MCPError) as error:
                    await ask(client, method, taskId=wrong)
                assert error.value.error.code == INVALID_PARAMS, wrong
        found = await ask(client, "tasks/get", taskId=encoded(json.dumps(forged)))
        assert found["result"]["isError"] and found["result"]["structuredContent"]["ok"] is False
        assert (await ask(client, "tasks/get", taskId=task))["status"] == "working"
    assert not [e for e in world.ctx.ledger.events() if e.subject == "job/jlive" and "cancel" in e.kind]
