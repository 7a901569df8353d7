"""Awaited programs: their output, and that a canceled program leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import psutil
import pytest

from gpuwarden.core import processes

ECHO = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.exit(3)"]
MEGABYTE = b"0123456789abcdef" * 65_536


@pytest.mark.anyio
async def test_input_is_written_while_output_is_read() -> None:
    assert await processes.run(ECHO, MEGABYTE) == (3, MEGABYTE)
    assert await processes.run(ECHO) == (3, b"")
    assert await processes.run(["echo", "hello"], keep=False) == (0, b"")
    assert await processes.run(["true"], MEGABYTE) == (0, b"")


async def started() -> None:
    async with await processes.start(["sleep", "60"]) as process:
        await process.wait()


async def ran() -> None:
    await processes.run(["sleep", "60"], b"more")


async def cancelled_after(steps: int, program: Callable[[], Awaitable[None]]) -> None:
    """Start a program, and cancel it after `steps` steps of the event loop."""
    async with anyio.create_task_group() as group:
        group.start_soon(program)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("program", [started, ran])
def test_program_cancelled_during_startup_leaves_no_process(program: Callable[[], Awaitable[None]]) -> None:
    """Starting a program takes asyncio about seven steps, and a cancellation can come after any of them."""
    gc.collect()
    before = psutil.Process().children()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        for steps in range(14):
            anyio.run(cancelled_after, steps, program)
        gc.collect()
    assert [str(warning.message) for warning in seen] == []
    assert psutil.Process().children() == before
