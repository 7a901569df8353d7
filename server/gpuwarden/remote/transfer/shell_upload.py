"""Push files to a machine that has a POSIX shell and `sha256sum` but no Python. The runner itself is sent this way.

A file is written to `.NAME.DIGEST.part` in its final folder. If the connection is lost, the next push appends to this
part file. The digest in the name prevents a push of another version from appending to it. The machine confirms each
piece before the next piece is sent. Pieces grow with the number of bytes transferred over the connection, so only a
small share must be sent again after a lost connection.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import anyio
from anyio import to_thread

from gpuwarden.core.errors import BadReply, BadRequest, Unreachable
from gpuwarden.core.task_groups import first_error
from gpuwarden.remote.ssh.machine import Dialogue, Ssh
from gpuwarden.remote.ssh.outcomes import CommandFailed, Ran
from gpuwarden.remote.transfer.safe_open import open_regular
from gpuwarden.remote.transfer.upload_stream import SHARE, Counts, Row, digest

PUT_S = 60.0
PARALLEL = 3
_CHUNK = 1 << 18
PIECE = 64 << 10
MAX_PIECE = 2 << 20

# $1 file, $2 size: succeed if the file is complete.
_THERE = '[ -f "$1" ] && [ "$(wc -c < "$1")" -eq "$2" ]'

# $1 folder, $2 name, $3 size: write stdin to a file.
_PUT = r"""
umask 077
[ -f "$1/$2" ] && [ "$(wc -c < "$1/$2")" -eq "$3" ] && exec cat > /dev/null
mkdir -p -- "$1" || exit 73
temporary="$1/.$2.$$.tmp"
trap 'rm -f -- "$temporary"' EXIT
cat > "$temporary" && [ "$(wc -c < "$temporary")" -eq "$3" ] || exit 74
sync "$temporary" 2>/dev/null
mv -f -- "$temporary" "$1/$2"
""".strip()

# $1 folder: print the free KiB and inodes of its file system.
_ROOM = r"""
umask 077
mkdir -p -- "$1" || exit 73
df -Pk -- "$1" | tail -n 1 | awk '{print $4}'
df -Pi -- "$1" 2>/dev/null | tail -n 1 | awk '{print $4}'
""".strip()

# $1 file, $2 part, $3 size, $4 digest: print `done`, or the size of the part.
_HERE = r"""
if [ -f "$1" ] && [ ! -L "$1" ] && [ "$(wc -c < "$1")" -eq "$3" ] && [ "$(sha256sum < "$1" | cut -c1-64)" = "$4" ]
then echo done; exit 0; fi
umask 077
mkdir -p -- "${1%/*}" || exit 73
[ -L "$2" ] && exit 73
if [ -f "$2" ]; then wc -c < "$2"; else echo 0; fi
""".strip()

# $1 part, $2 offset: append pieces, unless another process wrote to the part. A piece is a line with a size, then that
# many bytes and a newline. The reply to a piece is a line with the new size of the part.
_APPEND = r"""
umask 077
: >> "$1" || exit 74
[ "$(wc -c < "$1")" -eq "$2" ] || exit 75
while read -r size; do
  head -c "$size" >> "$1" || exit 74
  read -r end
  wc -c < "$1" || exit 74
done
""".strip()

# $1 part: create it empty.
_EMPTY = r"""
umask 077
: >> "$1" || exit 74
""".strip()

# $1 file, $2 part, $3 digest: rename the part to the file; delete a part with another digest.
_FINISH = r"""
if [ "$(sha256sum < "$2" | cut -c1-64)" != "$3" ]; then rm -f -- "$2"; exit 76; fi
sync "$2" 2>/dev/null
mv -f -- "$2" "$1"
""".strip()


async def put(machine: Ssh, path: str, content: bytes) -> None:
    """Write one small file atomically, readable only by its owner.

    An existing file of the same size is skipped, because each file's name contains its digest. Raises `BadRequest` if
    the machine can't write the file, for example because the disk is full.
    """
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    # A connection may break before all files are sent, so the next attempt skips the files that have arrived.
    if len(content) > PIECE:
        seen = await machine.run(["/bin/sh", "-c", _THERE, "sh", path, str(len(content))], timeout_s=PUT_S)
        if seen.code == 0:
            return

    async def pieces() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(content), _CHUNK):
            yield content[at : at + _CHUNK]

    argv = ["/bin/sh", "-c", _PUT, "sh", folder, name, str(len(content))]
    check_ran(await machine.feed(argv, pieces(), stall_s=PUT_S), path)


@dataclass
class ShellPush:
    """One push through the shell. `lost` waits before the next try, or raises an error after too many failures."""

    machine: Ssh
    folder: str
    counts: Counts
    stall_s: float
    lost: Callable[[Unreachable, str, int], Awaitable[int]]

    async def room(self) -> tuple[int | None, int | None]:
        """Return the free bytes and inodes of the folder's file system; None if unknown."""
        ran = await self._shell(_ROOM, self.folder)
        numbers = [int(word) if word.isdigit() else None for word in ran.out.decode("ascii", "replace").split()]
        free, inodes = [*numbers, None, None][:2]
        return None if free is None else free * 1024, inodes

    async def run(self, entries: Sequence[Row]) -> None:
        """Send all files, several at a time, the largest first."""
        queue = iter(sorted(entries, key=lambda e: -e.size))
        with first_error():
            async with anyio.create_task_group() as group:
                for _ in range(min(PARALLEL, len(entries))):
                    group.start_soon(self._work, queue)

    async def _work(self, queue: Iterator[Row]) -> None:
        for entry in queue:
            sha256 = await to_thread.run_sync(digest, entry)
            await self._send(entry, sha256)
            self.counts.landed.add(entry.name)

    async def _send(self, entry: Row, sha256: str) -> None:
        """Send one file, starting at the end of its part, until the machine computes the same digest."""
        target = f"{self.folder}/{entry.name}"
        above, _, name = target.rpartition("/")
        part = f"{above}/.{name[:120]}.{sha256[:16]}.part"
        failures, reached, wrong = 0, -1, False
        while True:
            try:
                offset = await self._offset(entry, sha256, target, part)
                if offset is None:
                    self.counts.skipped += entry.size if reached < 0 else 0
                    return
                failures = 0 if offset > reached else failures
                if reached < 0:
                    self.counts.resumed += min(offset, entry.size)
                reached = offset
                if await self._append(entry, sha256, target, part, offset):
                    return
                if wrong:
                    raise BadReply(
                        f"{entry.path} changed while it was being sent",
                        "Send it again when no process is writing to it.",
                    )
                wrong = True
            except Unreachable as lost:
                failures = await self.lost(lost, entry.name, failures)

    async def _offset(self, entry: Row, sha256: str, target: str, part: str) -> int | None:
        """Return the size of the part on the machine; None if the file is complete."""
        ran = await self._shell(_HERE, target, part, str(entry.size), sha256)
        word = ran.out.decode("ascii", "replace").strip()
        if word == "done":
            return None
        if not word.isdigit():
            raise BadReply(f"invalid reply about the size of {entry.name}: {word[:80]!r}", "Push again.")
        return int(word)

    async def _append(self, entry: Row, sha256: str, target: str, part: str, offset: int) -> bool:
        """Send the remaining bytes and rename the part. If its digest is wrong, delete it and return False."""
        if offset < entry.size:
            await self._send_pieces(entry, target, part, offset)
        elif entry.size == 0:
            await self._shell(_EMPTY, part)
        ran = await self.machine.run(["/bin/sh", "-c", _FINISH, "sh", target, part, sha256], timeout_s=600)
        if ran.code == 76:
            return False
        check_ran(ran, target)
        return True

    async def _send_pieces(self, entry: Row, target: str, part: str, offset: int) -> None:
        session = Dialogue(self.machine, ["/bin/sh", "-c", _APPEND, "sh", part, str(offset)])
        at = offset
        try:
            with await to_thread.run_sync(open_regular, entry.path, entry.identity) as file:
                file.seek(offset)
                while at < entry.size:
                    size = min(max(PIECE, (at - offset) // SHARE), MAX_PIECE, entry.size - at)
                    piece = await to_thread.run_sync(file.read, size)
                    if len(piece) < size:
                        raise BadReply(
                            f"{entry.path} changed while it was being sent",
                            "Send it again when no process is writing to it.",
                        )
                    self.counts.sent += size
                    self.counts.name = entry.name
                    answer = await session.ask(b"%d\n%b" % (size, piece), timeout_s=self.stall_s)
                    at += size
                    if answer.strip() != b"%d" % at:
                        raise Unreachable(f"an earlier push of {entry.name} is still in progress", "Push again.")
        except CommandFailed as failed:
            if failed.exit_code == 75:
                raise Unreachable(f"an earlier push of {entry.name} is still in progress", "Push again.") from failed
            check_ran(Ran(failed.exit_code, b"", failed.err), target)
        finally:
            session.close()

    async def _shell(self, script: str, *args: str) -> Ran:
        ran = await self.machine.run(["/bin/sh", "-c", script, "sh", *args], timeout_s=600)
        check_ran(ran, args[0])
        return ran


def check_ran(ran: Ran, path: str) -> None:
    """Raise `BadRequest` if a command could not write to `path`."""
    if ran.code != 0:
        why = ran.err.decode("utf-8", "replace").strip()[-300:] or "no reason given"
        raise BadRequest(
            f"{path} can't be written on the machine: {why}", "Check free space, inodes and permissions there."
        )
