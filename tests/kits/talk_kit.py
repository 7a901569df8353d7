"""A client of the MCP server, and its user."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
from mcp.client.client import Client
from mcp_types import ElicitResult, Request, RequestParams
from pydantic import ConfigDict, TypeAdapter

from doors import JOB, PLATFORM
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.lifecycle.context import Context
from waiting import soon

ERAS = {"legacy": "2025-11-25", "2026-07-28": "2026-07-28"}
TOOLS = {
    "submit_job",
    "check_job",
    "cancel_job",
    "pull_artifacts",
    "verify_checkpoint",
    "teardown_request",
    "list_instances",
    "hub_repo_details",
    "dataset_search",
    "search_references",
}


class Person:
    """The user of the client: gives scripted answers to questions, and records the questions."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []

    async def __call__(self, context: object, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[no-any-return]


def says(approve: object) -> ElicitResult:
    return ElicitResult(action="accept", content={"approve": approve})  # type: ignore[dict-item]


class Talk:
    """A client's conversation: calls return the structured content, checked against the published schema."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.schemas: dict[str, dict[str, Any]] = {}

    async def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        if not self.schemas:
            self.schemas = {t.name: t.output_schema or {} for t in (await self.client.list_tools()).tools}
        result = await self.client.call_tool(tool, arguments)
        body = result.structured_content
        assert body is not None
        jsonschema.validate(body, self.schemas[tool])
        assert result.is_error is not body["ok"]
        told = json.loads(result.content[0].text)  # type: ignore[union-attr]
        assert told.items() <= body.items(), "the text says the same as the structured content"
        assert list(body)[:2] == list(told)[:2] == ["ok", "code"], "how it went is read first"
        return body

    async def error(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        body = await self.call(tool, **arguments)
        assert body["ok"] is False and body["code"] and body["message"] and body["hint"], (
            f"{tool} {str(arguments)[-200:]} answered {body}"
        )
        assert "Traceback" not in json.dumps(body)
        return body

    async def launched(self, **more: Any) -> str:
        checked = await self.call("submit_job", **{**JOB, **more})
        assert checked["code"] == "checked", checked
        assert "$" in checked["message"], "what it may cost"
        return str((await self.call("submit_job", **{**JOB, **more}, receipt=checked["receipt"]))["job_id"])

    async def until(self, tool: str, states: set[str], /, **arguments: Any) -> dict[str, Any]:
        return await soon(lambda: self.call(tool, **arguments), every=0.05, good=lambda body: body["state"] in states)

    async def proven(self, **more: Any) -> str:
        """Run a job to its end, and pull and verify its files, so that only the approval is missing."""
        job_id = await self.launched(**more)
        await self.until("check_job", {"succeeded"}, job_id=job_id)
        assert (await self.call("pull_artifacts", job_id=job_id))["files"] == 1
        assert (await self.call("verify_checkpoint", job_id=job_id))["verdict"] == "proven"
        return job_id


@asynccontextmanager
async def talking(ctx: Context, person: Person | None = None, mode: str = "2026-07-28") -> AsyncIterator[Talk]:
    async with Client(make_server(ctx), mode=mode, elicitation_callback=person) as client:
        yield Talk(client)


class Params(RequestParams):
    """The parameters of any request."""

    model_config = ConfigDict(extra="allow")


async def ask(client: Client, method: str, **params: Any) -> dict[str, Any]:
    """Send a request that the SDK has no method for; return the raw result."""
    request = Request[Params, str](method=method, params=Params(**params))
    return await client.session.send_request(request, TypeAdapter(dict[str, Any]))


def truth(ctx: Context) -> list[Any]:
    """Return the true state of the cloud's machines, independent of any reply."""
    return list(ctx.provider(PLATFORM).cloud.truths().values())  # type: ignore[attr-defined]


def metering(ctx: Context) -> bool:
    return any(t.meter for t in truth(ctx))
