"""Let clients wait for a job without keeping a call open, through the Tasks extension (io.modelcontextprotocol/tasks).

`check_job` with `until` waits for a limited time. A client that declares the extension gets a task instead, and polls
it. The server stores nothing: a task's id contains the state at the start of the wait, so tasks survive a restart, and
any server that uses the ledger can answer. An id alone gives no access, because every poll is a `check_job` call.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver.server import require_client_extension
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, InputRequiredResult, RequestParams
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gpuwarden.core.guidance import is_fan_out
from gpuwarden.core.models import Until
from gpuwarden.core.states import TERMINAL_JOBS

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

TASKS: Final = "io.modelcontextprotocol/tasks"
REVISION: Final = "2026-07-28"
"""The protocol revision that defines these tasks. Tasks in revision 2025-11-25 have other methods."""
METHODS: Final = ("tasks/get", "tasks/update", "tasks/cancel")
POLL_MS: Final = 5_000
FINAL: Final = frozenset({"bad_request", "not_found", "refused"})
"""Codes of errors that end a task, because a later poll would return them too."""
MAX_ID: Final = 4_096
"""Maximum length of an id. If the id would be longer, because the job has many alerts, no task is created."""

Request: TypeAlias = ServerRequestContext[Any, Any]
Check: TypeAlias = Callable[[Request, dict[str, Any]], Awaitable[CallToolResult | InputRequiredResult]]


class TaskParams(RequestParams):
    """Parameters for the extension's methods."""

    task_id: str = Field(alias="taskId", max_length=MAX_ID)


class WaitArguments(BaseModel):
    """The arguments of a call that waits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str = Field(max_length=64)
    until: Until
    log_cursor: int | None = Field(default=None, ge=0)
    log_bytes: int = Field(default=2_000, ge=0, le=16_000)

    @field_validator("job_id")
    @classmethod
    def _is_a_job(cls, value: str) -> str:
        if is_fan_out(value):
            raise ValueError("waiting for a fan-out is not supported")
        return value


class WaitSnapshot(BaseModel):
    """The values that a wait compares: the time of a job's last transition, its step, and digests of its alerts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float
    step: int | None
    alerts: tuple[str, ...]


class Wait(BaseModel):
    """A wait: its arguments, its start time in seconds since 1970, and the job's values at that time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: WaitArguments
    first: WaitSnapshot
    at: float = Field(ge=0, lt=1e11)

    @property
    def task_id(self) -> str:
        """Return the id that contains this wait."""
        return base64.urlsafe_b64encode(self.model_dump_json().encode()).decode().rstrip("=")

    @classmethod
    def read(cls, task_id: str) -> Wait:
        """Return the wait that an id contains. Raises MCPError."""
        try:
            return cls.model_validate_json(base64.urlsafe_b64decode(task_id + "=" * (-len(task_id) % 4)))
        except ValueError as error:
            raise MCPError(code=INVALID_PARAMS, message="unknown taskId") from error

    def is_over(self, now: WaitSnapshot, state: str) -> bool:
        """Return whether the awaited event has happened. A new alert ends any wait, because the job may be stalled."""
        moved = self.asked.until != "end" and now.since != self.first.since
        stepped = self.asked.until == "step" and now.step not in (None, self.first.step)
        return moved or stepped or state in TERMINAL_JOBS or bool({*now.alerts} - {*self.first.alerts})


class Tasks(Extension):
    """The MCP extension for tasks. `check` calls check_job for a client's request."""

    identifier = TASKS

    def __init__(self, ctx: Context, check: Check) -> None:
        self._ctx, self._check = ctx, check

    def methods(self) -> Sequence[MethodBinding]:
        """Return the extension's methods."""
        handlers = (self._get, self._acknowledge, self._acknowledge)
        return [
            MethodBinding(method, TaskParams, handler, frozenset({REVISION}))
            for method, handler in zip(METHODS, handlers, strict=True)
        ]

    async def intercept_tool_call(
        self, params: CallToolRequestParams, ctx: Request, call_next: CallNext
    ) -> HandlerResult:
        """Return a task for a check_job call that would wait, if the client's request declares the extension."""
        arguments = params.arguments or {}
        capabilities = ctx.session.client_capabilities
        declared = ctx.protocol_version == REVISION and TASKS in ((capabilities and capabilities.extensions) or {})
        if not declared or params.name != "check_job" or not arguments.get("until"):
            return await call_next(ctx)
        try:
            asked = WaitArguments.model_validate(arguments)
        except ValidationError:
            return await call_next(ctx)  # the tool explains the error
        result, body = await self._checked(ctx, asked)
        if result.is_error or body["state"] in TERMINAL_JOBS:
            return result
        wait = Wait(asked=asked, first=self._news(body), at=self._ctx.clock.now())
        if len(wait.task_id) > MAX_ID:
            return await call_next(ctx)
        return {"resultType": "task", **self._task(wait), **_working(body)}

    async def _get(self, ctx: Request, params: TaskParams) -> dict[str, Any]:
        """Check the job. A temporary error leaves the task unchanged."""
        require_client_extension(ctx, TASKS)
        wait = Wait.read(params.task_id)
        result, body = await self._checked(ctx, wait.asked)
        over = body["code"] in FINAL if result.is_error else wait.is_over(self._news(body), body["state"])
        ended = {"status": "completed", "result": result.model_dump(mode="json", by_alias=True, exclude_none=True)}
        return {"resultType": "complete", **self._task(wait), **(ended if over else _working(body))}

    async def _acknowledge(self, ctx: Request, params: TaskParams) -> dict[str, Any]:
        """Acknowledge an update or a cancellation, and change nothing.

        Tasks never ask for input, and the job of a canceled task continues. Only `cancel_job` ends the job.
        """
        require_client_extension(ctx, TASKS)
        Wait.read(params.task_id)
        return {"resultType": "complete"}

    async def _checked(self, ctx: Request, asked: WaitArguments) -> tuple[CallToolResult, dict[str, Any]]:
        result = await self._check(ctx, asked.model_dump(exclude={"until"}, exclude_none=True))
        assert isinstance(result, CallToolResult) and result.structured_content, "check_job asks the client nothing"
        return result, result.structured_content

    def _news(self, body: dict[str, Any]) -> WaitSnapshot:
        subject = f"job/{body['job_id']}"
        row = self._ctx.ledger.row(subject)
        assert row is not None, "the job was just checked"
        raised = (event.data for event in self._ctx.ledger.standing_alerts() if event.subject == subject)
        alerts = (*body["alerts"], *(f"{alert.condition} {alert.text}" for alert in raised))
        digests = {sha256(alert.encode()).hexdigest()[:8] for alert in alerts}
        return WaitSnapshot(since=row.since, step=body["step"], alerts=tuple(sorted(digests)))

    def _task(self, wait: Wait) -> dict[str, Any]:
        return {
            "taskId": wait.task_id,
            "createdAt": _iso(wait.at),
            "lastUpdatedAt": _iso(self._ctx.clock.now()),
            "ttlMs": None,
            "pollIntervalMs": POLL_MS,
        }


def _working(body: dict[str, Any]) -> dict[str, Any]:
    step = "" if body.get("step") is None else f", step {body['step']}"
    return {"status": "working", "statusMessage": f"{body.get('state') or body['code']}{step}"}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
