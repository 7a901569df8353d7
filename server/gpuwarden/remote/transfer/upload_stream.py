"""Push files as one stream to an agent on the machine (`upload_agent`), which confirms them. All calls block.

Each side reads every byte once: this side hashes a file while sending it, and the agent hashes it while writing it.
If both digests are equal, the agent renames the part file. If a file may already exist on the machine, its digest there
is compared first.

If the connection is lost, bytes that were sent but not confirmed must be sent again. Their number is therefore limited
to a share of the bytes transferred over the connection: an eighth at first, for a fast start despite high latency, and
a fortieth after a connection has been lost.

Small files are sent in batches, and are read during the login.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.errors import BadReply, BadRequest, Unreachable, WardenError
from gpuwarden.core.safe_names import check_name
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.session import Session
from gpuwarden.remote.transfer.safe_open import Identity, identity_of, open_regular, read_regular

SMALL_BYTES: Final = 64 << 10
ASK: Final = 2000
TOGETHER: Final = 500
READ_AHEAD: Final = 32 << 20
AHEAD: Final = 64 << 10
MAX_AHEAD: Final = 8 << 20
SHARE: Final = 40
TRUSTING_SHARE: Final = 8
SYNC_S: Final = 600.0
HASH_BYTES_S: Final = 20e6
"""The lowest expected hash rate on the machine, in bytes per second. It limits the wait for a digest."""
END_S: Final = 1.0
_PIECE: Final = 1 << 18
_HEADER: Final = 16
_GATHER: Final = 128 << 10
_HOLE: Final = 1 << 28
_ZEROS: Final = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Row:
    """One file to push: its name in the remote folder, local path, size in bytes, mtime and identity."""

    name: str
    path: Path
    size: int
    mtime_ns: int
    identity: Identity

    @property
    def key(self) -> str:
        """Return the key in the part file's name. Each version of the file has a different key."""
        identity = f"{self.name}\0{self.size}\0{self.mtime_ns}".encode("utf-8", "surrogatepass")
        return hashlib.sha256(identity).hexdigest()[:16]


def row(name: str, path: Path) -> Row:
    """Return a `Row` for one file. Raises `BadRequest` for a link, a device or a name outside the folder."""
    if name.startswith("/"):
        raise BadRequest(f"{name!r} is an absolute path", "Use names relative to the folder.")
    check_name(name, windows=False)
    try:
        info = os.lstat(path)
    except OSError:
        info = None
    if info is None or not stat.S_ISREG(info.st_mode):
        with open_regular(path) as file:  # raises an error with the reason
            info = os.fstat(file.fileno())
    return Row(name, path, info.st_size, info.st_mtime_ns, identity_of(info))


@cache
def agent_source() -> str:
    """Return the agent's source code, which is passed to Python as an argument."""
    return files("gpuwarden.remote.transfer").joinpath("upload_agent.py").read_text("utf-8")


@dataclass
class Counts:
    """The progress of a push across all of its connections."""

    sent: int = 0
    resumed: int = 0
    skipped: int = 0
    retries: int = 0
    begun: set[str] = field(default_factory=set)
    landed: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    """The names of files that arrived with a wrong digest."""


class UploadStream:
    """One connection of a push."""

    def __init__(self, session: Session, folder: str, counts: Counts, stall_s: float) -> None:
        self.session, self.folder, self.counts, self.stall_s = session, folder, counts, stall_s
        self._answer = bytearray()
        self._buffer = memoryview(bytearray(1 << 16))
        self._waiting = bytearray()
        self._rows: list[Row] = []
        self._read: dict[str, bytes] = {}
        self._carried = self._confirmed = self._bytes = 0

    @property
    def progressed(self) -> bool:
        """Return whether the machine has confirmed receiving any data."""
        return self._confirmed > 0 or self._bytes > 0

    def run(self, rows: Sequence[Row], check_room: Callable[[dict[str, Any]], None]) -> None:
        """Send the missing files, and sync them to disk on the machine."""
        small = [entry for entry in rows if entry.size <= SMALL_BYTES]
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(self.session.start, None)
            self._read_ahead(small, started.done)
            started.result()
        hello = self._next("free")
        fresh = hello.get("fresh") is True
        check_room(hello)
        offsets = {} if fresh else self._present(rows)
        there = self.counts.landed | offsets.keys()
        for some in self._batches([entry for entry in small if entry.name not in there]):
            self._send_small(some)
        for entry in rows:
            if entry.name not in self.counts.landed and (entry.size > SMALL_BYTES or entry.name in offsets):
                self._send(entry, offsets.get(entry.name, 0))
        self._write(b"sync\n")
        self._flush()
        self._next("synced", SYNC_S, sum(entry.size for entry in self._rows))
        if self._confirmed < len(self._rows):
            raise BadReply("the machine confirmed fewer files than were sent to it", "Push again.")
        # Wait briefly for the agent to exit, because killing it takes longer than pushing a small file. Errors are
        # ignored, because all files have been confirmed.
        self.session.end_input()
        with suppress(TimeoutError, WardenError):
            if not self.session.read_into(self._buffer, END_S):
                self.session.finish()

    # ---------------------------------------------------------------------------------------------- present files

    def _present(self, rows: Sequence[Row]) -> dict[str, int]:
        """Record the files that already exist with the right digest. Return the sizes of part files by name."""
        offsets: dict[str, int] = {}
        same: list[Row] = []
        for some in _chunks(rows, ASK):
            answer = self._ask({"ask": [[r.name, r.size, r.key] for r in some]}, "have")["have"]
            for entry, state in zip(some, _list(answer, len(some)), strict=True):
                there, part = _list(state, 2)
                if there is True:
                    same.append(entry)
                if isinstance(part, int) and 0 < part <= entry.size and entry.name not in self.counts.wrong:
                    offsets[entry.name] = part
        for some in _chunks(same, ASK):
            ours = [digest(entry) for entry in some]
            size = sum(entry.size for entry in some)
            theirs = self._ask({"digest": [r.name for r in some]}, "sha256", size)["sha256"]
            for entry, here, there in zip(some, ours, _list(theirs, len(some)), strict=True):
                if here == there:
                    self.counts.skipped += entry.size if entry.name not in self.counts.begun else 0
                    self.counts.landed.add(entry.name)
        return offsets

    def _ask(self, request: dict[str, Any], kind: str, size: int = 0) -> dict[str, Any]:
        self._write(json.dumps(request).encode() + b"\n")
        self._flush()
        return self._next(kind, size=size)

    # ------------------------------------------------------------------------------------------------------ sending

    def _read_ahead(self, rows: Sequence[Row], enough: Callable[[], bool]) -> None:
        """Read small files during the login, until `enough` returns True or `READ_AHEAD` bytes have been read."""
        left = READ_AHEAD
        for entry in rows:
            if enough() or (left := left - entry.size) < 0:
                return
            self._read[entry.name] = read_small(entry)

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Yield batches of small files, limited in number and size."""
        some: list[Row] = []
        size = 0
        for entry in rows:
            if some and (len(some) == TOGETHER or size + entry.size > min(_GATHER, self._ahead // 8)):
                yield some
                some, size = [], 0
            some.append(entry)
            size += entry.size
        if some:
            yield some

    def _send_small(self, rows: Sequence[Row]) -> None:
        """Send a batch of small files: first all names, sizes and digests, then the bytes."""
        self.counts.begun.update(entry.name for entry in rows)
        self._rows += rows
        contents = [self._read.pop(entry.name, b"") or read_small(entry) for entry in rows]
        words = (
            (entry.name, str(entry.size), hashlib.sha256(content).hexdigest())
            for entry, content in zip(rows, contents, strict=True)
        )
        head = os.fsencode("\0".join(word for some in words for word in some))
        self._write(b"files %d\n" % len(head) + head + b"".join(contents))
        self._count(sum(entry.size for entry in rows))

    def _send(self, entry: Row, offset: int) -> None:
        self._rows.append(entry)
        if entry.name not in self.counts.begun:
            self.counts.begun.add(entry.name)
            self.counts.resumed += offset
        with open_regular(entry.path, entry.identity) as file:
            self._write(json.dumps({"part": [entry.name, entry.size, entry.key, offset]}).encode() + b"\n")
            self._send_pieces(entry, file, offset)

    def _send_pieces(self, entry: Row, file: BufferedReader, offset: int) -> None:
        """Send a file, starting at `offset`. For a hole, only its length is sent."""
        sha, fd, room = hashlib.sha256(), file.fileno(), memoryview(bytearray(_HEADER + _PIECE))
        buffer = room[_HEADER:]
        at = 0
        for end, hole in _extents(fd, entry.size):
            while at < end:
                most = min(end - at, offset - at if at < offset else end - at)
                if hole:
                    count = min(most, _HOLE)
                    for start in range(0, count, len(_ZEROS)):
                        sha.update(_ZEROS[: count - start])
                    if at >= offset:
                        self._write(b"Z %d\n" % count)
                        self._flush()
                    at += count
                    continue
                piece = buffer[: min(most, len(buffer), self._ahead // 2)]
                count = os.preadv(fd, [piece], at) if hasattr(os, "preadv") else _read_at(file, at, piece)
                if not count:
                    raise _changed(entry)
                sha.update(piece[:count])
                if at >= offset:
                    room[:_HEADER] = b"D %013d\n" % count
                    self._flush()
                    self.session.send(room[: _HEADER + count], self.stall_s)
                    self._count(count)
                at += count
        self._write(b"E %s\n" % sha.hexdigest().encode())

    @property
    def _ahead(self) -> int:
        """Return the limit on unconfirmed bytes."""
        if self.counts.retries:
            return min(max(AHEAD, self._carried // SHARE), MAX_AHEAD)
        return min(max(4 * AHEAD, self._carried // TRUSTING_SHARE), MAX_AHEAD)

    def _count(self, size: int) -> None:
        """Count sent bytes, and wait while too many of them are unconfirmed."""
        self.counts.sent += size
        self._carried += size
        if len(self._waiting) >= min(_GATHER, self._ahead):
            self._flush()
        if self._carried - self._bytes > self._ahead // 2:
            self._read_answers(0.0)
        if self._carried - self._bytes > self._ahead:
            self._flush()
            since, seen = time.monotonic(), self._bytes
            while self._carried - self._bytes > self._ahead:
                self._read_answers(0.2)
                if self._bytes != seen:
                    since, seen = time.monotonic(), self._bytes
                elif time.monotonic() - since > self.stall_s:
                    raise self._stalled()

    def _write(self, data: bytes) -> None:
        self._waiting += data

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            if not self.session.send(data, self.stall_s):
                self._read_answers(1.0)  # the agent may have reported an error before it exited

    def _stalled(self) -> Unreachable:
        return Unreachable(f"the machine confirmed no data for {self.stall_s:g} s", "Push again.")

    # ------------------------------------------------------------------------------------------------ confirmations

    def _next(self, kind: str, patience_s: float = 0.0, size: int = 0) -> dict[str, Any]:
        """Return the next reply with the key `kind`, and count the confirmations that arrive before it.

        Any other line restarts the timeout. The total wait is limited to the timeout plus the time to hash `size`
        bytes.
        """
        patience_s = max(self.stall_s, patience_s)
        end = time.monotonic() + patience_s
        limit = end + size / HASH_BYTES_S
        while True:
            lines = self._read_answers(0.2)
            for answer in lines:
                if kind in answer:
                    return answer
            now = time.monotonic()
            if lines:
                end = min(now + patience_s, limit)
            if now > end:
                raise self._stalled()

    def _read_answers(self, wait_s: float) -> list[dict[str, Any]]:
        """Read the available lines, and count the files and bytes that they confirm."""
        try:
            count = self.session.read_into(self._buffer, wait_s)
        except TimeoutError:
            return []
        if not count:
            self.session.finish()
            raise BadReply("the agent on the machine exited without a reply", "Push again.")
        self._answer += self._buffer[:count]
        *lines, rest = bytes(self._answer).split(b"\n")
        self._answer = bytearray(rest)
        if len(rest) > 1 << 22:
            raise _invalid(rest)
        return [self._heard(text) for text in lines]

    def _heard(self, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
            if not isinstance(answer, dict):
                raise _invalid(text)
            if "error" in answer:
                raise BadRequest(
                    f"{self.folder} can't be written on the machine: {line(str(answer['error'])[:1000])}",
                    "Check free space, inodes and permissions there.",
                )
            if "busy" in answer:
                raise Unreachable(f"an earlier push to {self.folder} is still in progress", "Push again.")
            if "done" in answer:
                self._confirm(int(answer["done"]), int(answer["bytes"]), {int(n) for n in answer["bad"]})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise _invalid(text) from error
        return answer

    def _confirm(self, done: int, size: int, bad: set[int]) -> None:
        if not self._confirmed <= done <= len(self._rows) or not self._bytes <= size <= self._carried:
            raise BadReply("the machine confirmed files that were not sent to it", "Push again.")
        if not all(self._confirmed <= n < done for n in bad):
            raise BadReply("the machine confirmed files that were not sent to it", "Push again.")
        for number in range(self._confirmed, done):
            entry = self._rows[number]
            if number not in bad:
                self.counts.landed.add(entry.name)
            elif entry.name in self.counts.wrong:
                raise _changed(entry)
            else:
                self.counts.wrong.add(entry.name)
        self._confirmed, self._bytes = done, size


def _invalid(text: bytes) -> BadReply:
    return BadReply(f"invalid reply to a push: {text[:80]!r}", "Push again.")


def _changed(entry: Row) -> BadReply:
    return BadReply(f"{entry.path} changed while it was being sent", "Send it again when no process is writing to it.")


def _list(value: object, size: int) -> list[Any]:
    """Return `value`. Raises `BadReply` if it is not a list of this length."""
    if not isinstance(value, list) or len(value) != size:
        raise _invalid(str(value)[:80].encode())
    return value


def _chunks(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    return (rows[at : at + size] for at in range(0, len(rows), size))


def read_small(entry: Row) -> bytes:
    """Return a small file's bytes. Raises `BadReply` if its size has changed."""
    content = read_regular(entry.path, entry.size + 1, entry.identity)
    if len(content) != entry.size:
        raise _changed(entry)
    return content


def digest(entry: Row) -> str:
    """Return the hex sha256 of a file to send. Raises `BadRequest` if the file can't be sent."""
    with open_regular(entry.path, entry.identity) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_at(file: BufferedReader, at: int, piece: memoryview) -> int:
    file.seek(at)
    return file.readinto(piece)


def _extents(fd: int, size: int) -> Iterator[tuple[int, bool]]:
    """Yield the end offset of each range of a file, and whether the range is a hole."""
    at = 0
    if hasattr(os, "SEEK_HOLE") and os.fstat(fd).st_blocks * 512 < size:
        while at < size:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # no more data
                break
            if data > at:
                yield min(data, size), True
            at = os.lseek(fd, data, os.SEEK_HOLE)
            yield min(at, size), False
        if at < size:
            yield size, True
    else:
        yield size, False
