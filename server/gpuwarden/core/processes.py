"""Run programs as child processes and await them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import Process

PIPE: Final = subprocess.PIPE


async def start(
    argv: Sequence[str],
    *,
    stdin: int | None = PIPE,
    stdout: int | None = PIPE,
    stderr: int | None = PIPE,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Process:
    """Start a program; the caller must close the process.

    Canceling a start would leave a child that is never reaped and pipes that are never closed (asyncio waits for them,
    and anyio cancels that wait as well). To prevent this, a start always completes, and the caller's next await is
    canceled instead.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(  # noqa: TID251
            argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd
        )
    return process  # noqa: RET504 - mypy: a scope may swallow exceptions raised in it


async def run(argv: Sequence[str], given: bytes = b"", *, keep: bool = True) -> tuple[int, bytes]:
    """Run a program until it exits. Return its exit code, and its standard output if `keep` is true.

    The program is killed on cancellation.
    """
    quiet = subprocess.DEVNULL
    out = PIPE if keep else quiet
    async with await start(argv, stdin=PIPE if given else quiet, stdout=out, stderr=quiet) as process:
        parts: list[bytes] = []
        async with anyio.create_task_group() as group:
            if process.stdin:
                group.start_soon(_feed, process, given)
            if process.stdout:
                parts = [part async for part in process.stdout]
            code = await process.wait()
    return code, b"".join(parts)


async def _feed(process: Process, given: bytes) -> None:
    assert process.stdin
    try:
        await process.stdin.send(given)
        await process.stdin.aclose()
    except (anyio.BrokenResourceError, BrokenPipeError, ConnectionResetError):
        return  # the program ended before it read all input; its output contains the reason
