"""Push many small files in batches, as tar streams that the machine confirms. It needs Python there."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from anyio import to_thread

from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.remote.ssh.session import Dialogue, Ssh
from gpuwarden.remote.transfer.safe_open import open_regular

SMALL_BYTES = 64 << 10
BATCH = 500
ASK = 5000


@dataclass(frozen=True)
class Row:
    """One file to push: its name below the remote folder, its local path, size and hex sha256."""

    name: str
    path: Path
    size: int
    sha256: str


class UploadSession:
    """Upload session for one remote directory. Close it after an error."""

    def __init__(self, machine: Ssh, python: str, folder: str, stall_s: float) -> None:
        self.folder, self.stall_s = folder, stall_s
        self.session = Dialogue(machine, [python, "-I", "-c", _source(), folder])

    async def here(self, rows: Sequence[Row]) -> set[str]:
        """Return the names of those that are there already, by their digest."""
        found: set[str] = set()
        for at in range(0, len(rows), ASK):
            found |= await self._ask(rows[at : at + ASK], b"", 4 * self.stall_s)
        return found

    async def send(self, rows: Sequence[Row]) -> set[str]:
        """Send these, and return the names of those that are there now."""
        return await self._ask(rows, await to_thread.run_sync(_packed, rows), self.stall_s)

    async def sync(self) -> None:
        """Make what was sent durable there."""
        await self._say({"sync": True}, b"", 600)

    def close(self) -> None:
        """End it."""
        self.session.close()

    async def _ask(self, rows: Sequence[Row], data: bytes, timeout_s: float) -> set[str]:
        request = {"files": [[r.name, r.size, r.sha256] for r in rows], "bytes": len(data)}
        numbers = await self._say(request, data, timeout_s)
        if not all(0 <= n < len(rows) for n in numbers):
            raise BadReply("the machine confirms files that it was not sent", "Push again.")
        return {rows[n].name for n in numbers}

    async def _say(self, request: dict[str, object], data: bytes, timeout_s: float) -> list[int]:
        text = await self.session.ask(json.dumps(request).encode() + b"\n" + data, timeout_s=timeout_s)
        try:
            answer = json.loads(text)
            if "error" in answer:
                raise BadRequest(
                    f"{self.folder} can't be written on the machine: {str(answer['error'])[:300]}",
                    "Check free space, inodes and permissions there.",
                )
            return [int(n) for n in answer["here"]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadReply(f"invalid reply to a push: {text[:80]!r}", "Push again.") from error


def next_batch(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """Return the first rows that fit into `most` bytes, at least one."""
    size = 0
    for at, row in enumerate(rows[:BATCH]):
        size += row.size
        if at and size > most:
            return rows[:at]
    return rows[:BATCH]


def _packed(rows: Sequence[Row]) -> bytes:
    out = io.BytesIO()
    for number, row in enumerate(rows):
        with open_regular(row.path) as file:
            content = file.read(row.size)
        info = tarfile.TarInfo(str(number))
        info.size = len(content)
        out.write(info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512))
    return out.getvalue() + bytes(1024)


@cache
def _source() -> str:
    return files("gpuwarden.remote.transfer").joinpath("upload_agent.py").read_text("utf-8")
