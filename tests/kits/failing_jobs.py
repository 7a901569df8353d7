"""Run small programs as an agent's jobs, with one server's submit_job and check_job and the local backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client

from doors import environment
from gpuwarden.app import open_context
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.lifecycle.context import Context
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from waiting import soon

ENDED = {"succeeded", "failed", "canceled", "preempted"}
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def script(code: str, *needs: str) -> str:
    """Return a program with the header that the submit gate requires."""
    return f"# /// script\n# requires-python = '>=3.11'\n# dependencies = {list(needs)!r}\n# ///\n{code}"


def told(reply: dict[str, Any], want: str | None, *shown: str, sure: bool = True) -> None:
    """Check check_job's diagnoses of a failing job: the first entry, its evidence, and its certainty.

    Only a cause that is `sure` may be reported as likely, and only if public reports confirm its signature.
    """
    found = reply.get("diagnoses")
    assert found, reply
    first, *others = found
    assert want in {None, first["id"]}, (found, reply["log"])
    assert sure or first["certainty"] == "possible", found
    assert first["lines"].startswith("<<<DATA ") and first["fix"] and first["title"]
    for piece in shown:
        assert any(option in first["lines"] for option in piece.split("|")), (piece, first["lines"])
    rivals = [d["id"] for d in others if d["certainty"] == "likely"]
    assert first["certainty"] == "likely" or not rivals, f"{rivals} are more certain than the first"


def over(body: dict[str, Any]) -> bool:
    """Return whether a job has ended."""
    return body["state"] in ENDED


class Jobs:
    """A client's conversation with the server about jobs on this machine."""

    def __init__(self, client: Client, warden: Context) -> None:
        self.client, self.warden = client, warden
        self.runs = Path(warden.profile("local").run_root).expanduser()

    async def call(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """Make a tool call that must succeed."""
        body = (await self.client.call_tool(tool, arguments)).structured_content
        assert body is not None and body["ok"], body
        return body

    async def start(self, **spec: Any) -> str:
        """Submit a job and return its id."""
        spec = {"platform": "local", "outputs": ["out"], "timeout_s": 300, **spec}
        body = await self.call("submit_job", **{**spec, "env": {**QUIET, **spec.get("env", {})}})
        return str(body["job_id"])

    async def until(
        self,
        job_id: str,
        seconds: float = 600,
        *,
        step: int | None = None,
        good: Callable[[dict[str, Any]], bool] = over,
    ) -> dict[str, Any]:
        """Poll until the job has ended, reaches `step`, or satisfies `good`."""

        async def look() -> dict[str, Any] | None:
            body = await self.call("check_job", job_id=job_id, log_bytes=4_000)
            return body if (good(body) if step is None else body["step"] == step) else None

        return await soon(look, seconds, every=0.15)

    def folder(self, job_id: str) -> Path:
        """Return a job's run folder."""
        return self.runs / f"gw-{job_id}"

    async def ended(self, seconds: float = 600, **spec: Any) -> dict[str, Any]:
        """Run a job to its end."""
        return await self.until(await self.start(**spec), seconds)


@asynccontextmanager
async def jobs_here(home: Path) -> AsyncIterator[Jobs]:
    """Run a server with a new home folder, for any number of jobs.

    The jobs run without a sandbox, so that they fail as on rented machines, on the machine's disks, groups, and ports.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home / "user"))
        patch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))
        warden = open_context("test", env=environment(home))
        async with Client(make_server(warden)) as client:
            yield Jobs(client, warden)
