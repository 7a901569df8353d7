"""Let clients wait for a job without an open call, through the Tasks extension (io.modelcontextprotocol/tasks).

`check_job` with `until` waits at most 45 s. A client that declares the extension gets a task instead, and polls it.
The server stores nothing: a task's id contains the state in which the wait began, so tasks survive a restart, and any
server of the ledger can answer. No id gives access to anything, because every poll is a call of `check_job`.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, InputRequiredResult, RequestParams
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.core.guidance import is_fan_out
from gpuwarden.core.models import Until
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.wait import News, changed, news

TASKS: Final = "io.modelcontextprotocol/tasks"
REVISION: Final = "2026-07-28"
"""The revision whose tasks these are. The tasks of 2025-11-25 have other methods."""
METHODS: Final = ("tasks/get", "tasks/update", "tasks/cancel")
POLL_MS: Final = 5_000
MAX_ID: Final = 4_096
"""Maximum length of an id. A job with so many alerts that its id would be longer gets no task."""

Request: TypeAlias = ServerRequestContext[Any, Any]
Check: TypeAlias = Callable[[Request, dict[str, Any]], Awaitable[CallToolResult | InputRequiredResult]]


class TaskParams(RequestParams):
    """Parameters for the methods of the extension."""

    task_id: str = Field(alias="taskId", max_length=MAX_ID)


class Asked(BaseModel):
    """The arguments of a call that waits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str = Field(max_length=64)
    until: Until
    log_cursor: int | None = Field(default=None, ge=0)
    log_bytes: int = Field(default=2_000, ge=0, le=16_000)


class Wait(BaseModel):
    """A wait: its arguments, the job's state at its beginning, and the time of that in seconds since 1970."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: Asked
    first: News
    at: float = Field(ge=0, lt=1e11)

    @property
    def task_id(self) -> str:
        """Return the id that contains this wait."""
        return base64.urlsafe_b64encode(self.model_dump_json().encode()).decode().rstrip("=")

    @classmethod
    def read(cls, task_id: str) -> Wait:
        """Return the wait of an id. Raises MCPError."""
        try:
            return cls.model_validate_json(base64.urlsafe_b64decode(task_id + "=" * (-len(task_id) % 4)))
        except ValueError as error:
            raise MCPError(code=INVALID_PARAMS, message="unknown taskId") from error


class Tasks(Extension):
    """The MCP extension for tasks. `check` calls check_job for a client's request."""

    identifier = TASKS

    def __init__(self, ctx: Context, check: Check) -> None:
        self._ctx, self._check = ctx, check

    def methods(self) -> Sequence[MethodBinding]:
        """Return the extension's methods."""
        versions = frozenset({REVISION})
        handlers = (self._get, self._acknowledge, self._acknowledge)
        return [
            MethodBinding(method, TaskParams, handler, versions)
            for method, handler in zip(METHODS, handlers, strict=True)
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: Request, call_next: CallNext
    ) -> HandlerResult:
        """Return a task for a call of check_job that would wait, if the client's request declares the extension."""
        arguments = params.arguments or {}
        if params.name != "check_job" or not arguments.get("until") or not _declared(ctx):
            return await call_next(ctx)
        try:
            asked = Asked.model_validate(arguments)
        except ValidationError:
            return await call_next(ctx)  # the tool explains what is wrong
        if is_fan_out(asked.job_id):
            return await call_next(ctx)
        result = await self._checked(ctx, asked)
        if result.is_error:
            return result
        first = news(self._ctx, asked.job_id)
        wait = Wait(asked=asked, first=first, at=self._ctx.clock.now())
        if changed(first, first, asked.until) or len(wait.task_id) > MAX_ID:
            return await call_next(ctx)
        return {"resultType": "task", **self._task(wait), **_working(first)}

    async def _get(self, ctx: Request, params: TaskParams) -> dict[str, Any]:
        wait = Wait.read(params.task_id)
        result = await self._checked(ctx, wait.asked)
        now = wait.first if result.is_error else news(self._ctx, wait.asked.job_id)
        over = result.is_error or changed(wait.first, now, wait.asked.until)
        return {"resultType": "complete", **self._task(wait), **(_completed(result) if over else _working(now))}

    async def _acknowledge(self, _: Request, params: TaskParams) -> dict[str, Any]:
        """Acknowledge a cancellation or an update. No task asks for input, and a client that cancels stops polling.

        The job continues. Only `cancel_job` ends it.
        """
        Wait.read(params.task_id)
        return {"resultType": "complete"}

    async def _checked(self, ctx: Request, asked: Asked) -> CallToolResult:
        result = await self._check(ctx, asked.model_dump(exclude={"until"}, exclude_none=True))
        assert isinstance(result, CallToolResult), "check_job asks the client nothing"
        return result

    def _task(self, wait: Wait) -> dict[str, Any]:
        return {
            "taskId": wait.task_id,
            "createdAt": _iso(wait.at),
            "lastUpdatedAt": _iso(self._ctx.clock.now()),
            "ttlMs": None,
            "pollIntervalMs": POLL_MS,
        }


def _working(now: News) -> dict[str, Any]:
    step = "" if now.step is None else f", step {now.step}"
    return {"status": "working", "statusMessage": f"{now.state}{step}"}


def _completed(result: CallToolResult) -> dict[str, Any]:
    return {"status": "completed", "result": result.model_dump(mode="json", by_alias=True, exclude_none=True)}


def _declared(ctx: Request) -> bool:
    capabilities = ctx.session.client_capabilities
    return ctx.protocol_version == REVISION and TASKS in ((capabilities and capabilities.extensions) or {})


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
