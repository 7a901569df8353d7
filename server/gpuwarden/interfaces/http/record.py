"""Record a server's address next to the ledger that it uses, so that other commands can find the server.

At most one server can use a ledger.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import anyio
from filelock import FileLock, Timeout
from pydantic import ValidationError

from gpuwarden.core.errors import Conflict, NotFound
from gpuwarden.core.models import Frozen
from gpuwarden.private import private_folder, write_private

FILE: Final = "serve.json"
LOOK_S: Final = 5.0
"""Seconds between two checks for a new server."""


class Record(Frozen):
    """The address of the server that uses this state folder, for `gpuwarden dashboard` and `doctor`.

    `public_url` is the address of the reverse proxy in front of it, if any.
    """

    url: str
    pid: int
    public_url: str = ""


@contextlib.contextmanager
def recorded(home: Path, url: str, public_url: str = "") -> Iterator[None]:
    """Record the server next to the ledger while it runs. Raises Conflict if another server is running."""
    lock = FileLock(private_folder(home / "locks") / "serve.lock", mode=0o600)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise Conflict(
            "a server that uses this ledger is already running", "Open it in a browser with gpuwarden dashboard."
        ) from None
    file = home / FILE
    try:
        write_private(file, Record(url=url, pid=os.getpid(), public_url=public_url).model_dump_json())
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def running_server(home: Path) -> Record:
    """Return the record of the running server that uses this state folder. Raises NotFound if none is running."""
    lock = FileLock(private_folder(home / "locks") / "serve.lock", mode=0o600)
    with contextlib.suppress(Timeout, OSError, ValidationError):
        try:
            with lock.acquire(blocking=False):
                pass
        except Timeout:
            return Record.model_validate_json((home / FILE).read_bytes())
    raise NotFound("no server that uses this ledger is running", "Start one: gpuwarden serve")


async def replaced(home: Path, server: int, every_s: float = LOOK_S) -> None:
    """Wait until the server that started this process has ended and another server for this ledger is running.

    A watch keeps running if its server is killed, so that the machines are still polled. The next server starts another
    watch, with the current policy and keys.
    """
    while True:
        await anyio.sleep(every_s)
        if os.getppid() != server:
            with contextlib.suppress(NotFound):
                running_server(home)
                return
