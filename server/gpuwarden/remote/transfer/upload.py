"""Put files on a machine: resumed, compared by digest there, and named only when complete.

It only needs a POSIX shell and `sha256sum` on the remote side, because the runner itself arrives this way. A
file grows as `.NAME.DIGEST.part` beside its name; a cut continues there, and another version never continues it.

Bytes in flight when the connection is cut are lost, so the machine confirms each piece before the next one goes. Pieces
grow with what one connection has carried: a cut costs a small share of that, and a stable connection is not kept
waiting.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, Unreachable
from gpuwarden.core.safe_names import local_name
from gpuwarden.core.task_groups import first_error
from gpuwarden.remote.ssh.session import CommandFailed, Dialogue, Ran, Ssh
from gpuwarden.remote.transfer.receive import Progress
from gpuwarden.remote.transfer.safe_open import open_regular
from gpuwarden.remote.transfer.small_file_upload import SMALL_BYTES, Row, UploadSession, next_batch

PUT_S = 60.0
PARALLEL = 3
TRIES = 6
SPARE_KIB = 16 << 10
SPARE_INODES = 64
_CHUNK = 1 << 18
PIECE = 64 << 10
MAX_PIECE = 2 << 20
SHARE = 40

# $1 folder, $2 name, $3 size. A file under its final name is complete.
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

# $1 folder: free KiB and inodes of its file system.
_ROOM = r"""
umask 077
mkdir -p -- "$1" || exit 73
df -Pk -- "$1" | tail -n 1 | awk '{print $4}'
df -Pi -- "$1" 2>/dev/null | tail -n 1 | awk '{print $4}'
""".strip()

# $1 file, $2 part, $3 size, $4 digest: `done`, or how many bytes of the part are there.
_HERE = r"""
if [ -f "$1" ] && [ ! -L "$1" ] && [ "$(wc -c < "$1")" -eq "$3" ] && [ "$(sha256sum < "$1" | cut -c1-64)" = "$4" ]
then echo done; exit 0; fi
umask 077
mkdir -p -- "${1%/*}" || exit 73
[ -L "$2" ] && exit 73
if [ -f "$2" ]; then wc -c < "$2"; else echo 0; fi
""".strip()

# $1 part, $2 offset: append pieces, unless somebody else wrote meanwhile. Each comes as a line with its size, its
# bytes and a line end; each is confirmed by a line with the part's size after it.
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

# $1 part: make it, without a byte.
_EMPTY = r"""
umask 077
: >> "$1" || exit 74
""".strip()

# $1 file, $2 part, $3 digest: rename it; a wrong part is dropped.
_FINISH = r"""
if [ "$(sha256sum < "$2" | cut -c1-64)" != "$3" ]; then rm -f -- "$2"; exit 76; fi
sync "$2" 2>/dev/null
mv -f -- "$2" "$1"
""".strip()


@dataclass(frozen=True)
class Pushed:
    """The result of a push. `bytes_sent` crossed the network; `bytes_resumed` and `bytes_skipped` were present."""

    files: int
    bytes_sent: int
    bytes_resumed: int
    bytes_skipped: int
    retries: int


async def put(machine: Ssh, path: str, content: bytes) -> None:
    """Write one small file whose name is made of its content: atomic, private, and left alone when it is there.

    Raises `BadRequest` when the machine has no room for it.
    """
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name

    async def pieces() -> AsyncGenerator[bytes, None]:
        for at in range(0, len(content), _CHUNK):
            yield content[at : at + _CHUNK]

    argv = ["/bin/sh", "-c", _PUT, "sh", folder, name, str(len(content))]
    _check(await machine.feed(argv, pieces(), stall_s=PUT_S), path)


async def push(
    machine: Ssh,
    files: Mapping[str, Path],
    folder: str,
    *,
    python: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    stall_s: float = 30.0,
    tries: int = TRIES,
    clock: Clock | None = None,
) -> Pushed:
    """Copy an explicit roster, name below `folder` -> local file, to a machine and compare digests there.

    Small files go many at a time where the machine has a `python` (3.8 or newer), else one by one.

    Raises `BadRequest` for a name or file that can't be sent and when the machine lacks room, `Unreachable` after
    `tries` failures in a row without progress; what arrived stays and the next call continues.
    """
    entries = await to_thread.run_sync(lambda: [_entry(name, path) for name, path in files.items()])
    job = _Pusher(machine, folder.rstrip("/"), python, progress, stall_s, tries, clock or SystemClock())
    return await job.run(entries)


def _entry(name: str, path: Path) -> Row:
    """Return one hashed file of the roster; never a link, a device or a name that leaves the folder."""
    if name.startswith("/"):
        raise BadRequest(f"{name!r} is absolute; a roster has names below the folder", "Make it relative.")
    local_name(name, windows=False)
    with open_regular(path) as file:
        return Row(name, path, os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


class _Pusher:
    def __init__(
        self,
        machine: Ssh,
        folder: str,
        python: str | None,
        progress: Callable[[Progress], None] | None,
        stall_s: float,
        tries: int,
        clock: Clock,
    ) -> None:
        self.machine, self.folder, self.python, self.progress = machine, folder, python, progress
        self.stall_s, self.tries, self.clock = stall_s, tries, clock
        self.sent = self.resumed = self.skipped = self.retries = 0
        self.total = self.count = self.done = 0

    async def run(self, entries: list[Row]) -> Pushed:
        self.total, self.count = sum(e.size for e in entries), len(entries)
        await self._check_room()
        small = [e for e in entries if self.python and e.size <= SMALL_BYTES]
        if len(small) > 1:
            refused = await self._send_small(small)
            entries = [e for e in entries if e.size > SMALL_BYTES] + refused
        queue = iter(sorted(entries, key=lambda e: -e.size))
        with first_error():
            async with anyio.create_task_group() as group:
                for _ in range(min(PARALLEL, len(entries))):
                    group.start_soon(self._work, queue)
        return Pushed(self.count, self.sent, self.resumed, self.skipped, self.retries)

    async def _send_small(self, entries: list[Row]) -> list[Row]:
        """Send small files in batches; return those that did not arrive intact, to be sent alone."""
        wrong: list[Row] = []
        rest, failures, asked = entries, 0, False
        while rest:
            session, carried = UploadSession(self.machine, self.python or "", self.folder, self.stall_s), 0
            try:
                here = await session.here(rest)
                self.skipped += sum(e.size for e in rest if e.name in here) if not asked else 0
                asked, rest = True, self._arrived(rest, here)
                while rest:
                    some = next_batch(rest, min(max(PIECE, carried // SHARE), MAX_PIECE))
                    size = sum(e.size for e in some)
                    self.sent += size
                    here = await session.send(some)
                    carried, failures = carried + size, 0
                    wrong += [e for e in some if e.name not in here]
                    self._arrived(some, here)
                    rest = rest[len(some) :]
                await session.sync()
            except Unreachable as lost:
                failures = await self._lost(lost, rest[0].name if rest else self.folder, failures)
            finally:
                session.close()
        return wrong

    def _arrived(self, entries: Sequence[Row], here: set[str]) -> list[Row]:
        """Count what is there; return the rest."""
        for entry in entries:
            if entry.name in here:
                self._report(entry, 1)
        return [e for e in entries if e.name not in here]

    async def _lost(self, lost: Unreachable, name: str, failures: int) -> int:
        """Wait before the next try, or give up."""
        self.retries += 1
        if failures + 1 >= self.tries:
            raise Unreachable(f"{name} could not be sent: {lost.message}", "Push again to go on.") from lost
        await self.clock.sleep(min(2.0**failures / 2, 15.0))
        return failures + 1

    async def _check_room(self) -> None:
        ran = await self._shell(_ROOM, self.folder)
        numbers = [int(word) if word.isdigit() else None for word in ran.out.decode("ascii", "replace").split()]
        free, inodes = [*numbers, None, None][:2]
        if free is not None and free < self.total // 1024 + SPARE_KIB:
            raise BadRequest(
                f"{self.folder} on the machine has {free:,} KiB free and the files need {self.total // 1024:,}",
                "Free some space there, or choose another run root; nothing was sent.",
            )
        if inodes and inodes < self.count + SPARE_INODES:
            raise BadRequest(
                f"{self.folder} on the machine has {inodes:,} free inodes and the transfer needs {self.count:,}",
                "`df -i`: remove caches of many small files there, or choose another run root.",
            )

    async def _work(self, queue: Iterator[Row]) -> None:
        for entry in queue:
            await self._send(entry)

    async def _send(self, entry: Row) -> None:
        """Send one file from where it stopped, until the machine has computed the same digest."""
        target = f"{self.folder}/{entry.name}"
        above, _, name = target.rpartition("/")
        part = f"{above}/.{name[:120]}.{entry.sha256[:16]}.part"
        failures, reached, wrong = 0, -1, False
        while True:
            try:
                offset = await self._offset(entry, target, part)
                if offset is None:
                    self.skipped += entry.size if reached < 0 else 0
                    self._report(entry, 1)
                    return
                failures = 0 if offset > reached else failures
                if reached < 0:
                    self.resumed += min(offset, entry.size)
                reached = offset
                if await self._append(entry, target, part, offset):
                    self._report(entry, 1)
                    return
                if wrong:
                    raise BadReply(f"{entry.path} changed while it was sent", "Send it when nothing writes to it.")
                wrong = True
            except Unreachable as lost:
                failures = await self._lost(lost, entry.name, failures)

    async def _offset(self, entry: Row, target: str, part: str) -> int | None:
        """Return how many bytes are there; None when the file is complete."""
        ran = await self._shell(_HERE, target, part, str(entry.size), entry.sha256)
        word = ran.out.decode("ascii", "replace").strip()
        if word == "done":
            return None
        if not word.isdigit():
            raise BadReply(f"the machine did not say how much of {entry.name} it has: {word[:80]!r}", "Push again.")
        return int(word)

    async def _append(self, entry: Row, target: str, part: str, offset: int) -> bool:
        """Send the rest and rename it; return False when the part turned out wrong and was dropped."""
        if offset < entry.size:
            await self._send_pieces(entry, target, part, offset)
        elif entry.size == 0:
            await self._shell(_EMPTY, part)
        ran = await self.machine.run(["/bin/sh", "-c", _FINISH, "sh", target, part, entry.sha256], timeout_s=600)
        if ran.code == 76:
            return False
        _check(ran, target)
        return True

    async def _send_pieces(self, entry: Row, target: str, part: str, offset: int) -> None:
        session = Dialogue(self.machine, ["/bin/sh", "-c", _APPEND, "sh", part, str(offset)])
        at = offset
        try:
            with await to_thread.run_sync(open_regular, entry.path) as file:
                file.seek(offset)
                while at < entry.size:
                    size = min(max(PIECE, (at - offset) // SHARE), MAX_PIECE, entry.size - at)
                    piece = await to_thread.run_sync(file.read, size)
                    if len(piece) < size:
                        raise BadReply(f"{entry.path} changed while it was sent", "Send it when nothing writes to it.")
                    self.sent += size
                    answer = await session.ask(b"%d\n%b" % (size, piece), timeout_s=self.stall_s)
                    at += size
                    if answer.strip() != b"%d" % at:
                        raise Unreachable(f"an earlier push of {entry.name} was still writing", "Push again.")
                    self._report(entry, 0)
        except CommandFailed as failed:
            if failed.exit_code == 75:
                raise Unreachable(f"an earlier push of {entry.name} was still writing", "Push again.") from failed
            _check(Ran(failed.exit_code, b"", failed.err), target)
        finally:
            session.close()

    async def _shell(self, script: str, *args: str) -> Ran:
        ran = await self.machine.run(["/bin/sh", "-c", script, "sh", *args], timeout_s=600)
        _check(ran, args[0])
        return ran

    def _report(self, entry: Row, files: int) -> None:
        self.done += files
        if self.progress is not None:
            bytes_done = min(self.sent + self.resumed + self.skipped, self.total)
            self.progress(Progress(entry.name, bytes_done, self.total, self.done, self.count))


def _check(ran: Ran, path: str) -> None:
    if ran.code != 0:
        why = ran.err.decode("utf-8", "replace").strip()[-300:] or "no reason given"
        raise BadRequest(
            f"{path} can't be written on the machine: {why}", "Check free space, inodes and permissions there."
        )
