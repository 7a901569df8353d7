"""Tools for a job's outputs: pull_artifacts and verify_checkpoint."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools defined in a function.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context as ClientContext
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult
from pydantic import Field

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Level, Report, Where
from gpuwarden.interfaces import results
from gpuwarden.interfaces.mcp.tools.base import WRITE, JobId, answer
from gpuwarden.interfaces.mcp.tools.progress import Note, reporting

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

LOOK_S, LOOK_BYTES, LOOK_ENTRIES = 600.0, 1 << 40, 20_000
"""Limits for verifying one path: seconds, bytes and folder entries."""


def add(server: MCPServer[Any], ctx: "Context") -> None:
    """Add the tools to a server."""

    @server.tool(annotations=WRITE)
    async def pull_artifacts(
        job_id: JobId,
        dest: Annotated[str | None, Field(description="Folder in the working directory")] = None,
        also: Annotated[list[str] | None, Field(description="Remote paths to add to the outputs")] = None,
        client: ClientContext[Any, Any] = None,  # type: ignore[assignment]
    ) -> Annotated[CallToolResult, results.PullReply]:
        """Copy a job's declared outputs and log here and compare digests. Call again to resume."""
        from gpuwarden.lifecycle.artifacts.pull import pull

        target = _inside_cwd(dest)
        result = await reporting(
            client,
            lambda note: pull(
                ctx, job_id, target, also=also or (), progress=lambda p: note(p.bytes_done, p.bytes_total)
            ),
            "copying",
        )
        return answer(ctx, results.pulled(result))

    @server.tool(annotations=WRITE)
    async def verify_checkpoint(
        job_id: Annotated[str | None, Field(description="Job whose pulled copy is verified")] = None,
        path: Annotated[str | None, Field(description="Instead of job_id: path or hf://owner/name[/path]")] = None,
        level: Annotated[Level | None, Field(description="Depth. Teardown needs load; Hub default: structure")] = None,
        against: Annotated[str | None, Field(description="Earlier checkpoint, adapter base or GGUF source")] = None,
        where: Annotated[Where, Field(description="instance: verify on the machine; against is a path there")] = "auto",
        client: ClientContext[Any, Any] = None,  # type: ignore[assignment]
    ) -> Annotated[CallToolResult, results.VerifyReply]:
        """Prove that a checkpoint is complete, matches the machine's digests, is finite and loads. Runs no code."""
        from gpuwarden.checkpoints.budget import Budget, ByteCount
        from gpuwarden.lifecycle.artifacts.verify import verify
        from gpuwarden.lifecycle.execution.situation import following_of
        from gpuwarden.lifecycle.records import read_job

        if (job_id is None) == (path is None):
            raise BadRequest("give exactly one of job_id and path", "Omit the other.")
        if job_id is not None:
            read_job(ctx.ledger, job_id)  # raises for an unknown job, whose id would otherwise be treated as a path
        what = job_id or _address(ctx, path or "")
        there = where == "instance"
        other = None if against is None else against if there else _address(ctx, against)

        async def work(note: Note) -> Report:
            budget = Budget(LOOK_S, LOOK_BYTES, LOOK_ENTRIES)
            progress = ByteCount(note)
            return await verify(ctx, what, level, against=other, where=where, budget=budget, progress=progress)

        report = await reporting(client, work, "verifying")
        return answer(ctx, results.verified(report, following_of(ctx, what)))


def _address(ctx: "Context", what: str) -> str:
    """Return a Hub address unchanged, and anything else as a path on this machine.

    Over HTTP, only paths below the working directory and pulled copies are allowed, because the report lists files, and
    a token with the `read` scope does not imply an account on this machine.
    """
    from gpuwarden.hub.files import SCHEME

    if what.startswith(SCHEME):
        return what
    path = _usable(what)
    if get_access_token() is not None:
        real = path.resolve()
        if not any(real.is_relative_to(root.resolve()) for root in (Path.cwd(), ctx.home / "artifacts")):
            raise BadRequest(
                "over HTTP only pulled copies and paths below the server's working directory can be verified",
                "Pass a job id, or a path below that directory.",
            )
    return str(path)


def _usable(path: str) -> Path:
    """Return a path with its home folder expanded. Raises BadRequest if no file system accepts it."""
    if not path.strip() or "\x00" in path or len(path) > 4_096:
        raise BadRequest("path is empty, too long or contains a NUL character", "Specify a file or folder.")
    return Path(path).expanduser()


def _inside_cwd(dest: str | None) -> Path | None:
    """Return an agent's destination. Raises BadRequest unless it resolves to a path below the working directory.

    Hidden folders are refused, because programs read their settings from them and the machine chooses the file names.
    """
    if dest is None:
        return None
    root = Path.cwd().resolve()
    real = (root / _usable(dest)).resolve()
    if not real.is_relative_to(root):
        raise BadRequest("dest is outside the working directory", "Specify a folder below it, or omit dest.")
    if any(part.startswith(".") for part in real.relative_to(root).parts):
        raise BadRequest("dest is a hidden folder", "Specify a folder without a leading dot, or omit dest.")
    return real
