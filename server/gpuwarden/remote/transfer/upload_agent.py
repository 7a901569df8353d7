"""Receive files as one stream on the machine that they are pushed to, and confirm what is there.

    python -I -c SOURCE FOLDER

It begins with a line about the folder: `{"fresh": BOOL, "free": BYTES, "inodes": N}`. stdin is a sequence of requests,
each a line of JSON:

- `{"ask": [[name, size, key], ...]}`: `{"have": [[same, part], ...]}`, whether a file of that size is there, and how
  many bytes of its part.
- `{"digest": [name, ...]}`: `{"sha256": [hex, ...]}`, empty for what is not a file.
- `{"file": [name, size, sha256]}`, and the bytes: a small file, which gets its name when its digest is right.
- `{"part": [name, size, key, offset]}`, and pieces: `D n` with n bytes, `Z n` for a hole, and `E sha256` at the end,
  when the part gets its name if its digest is right, and is dropped if not.
- `{"sync": true}`: `{"synced": true}` once all of it is durable.

What was done is confirmed now and then by `{"done": files, "bytes": n, "bad": [number, ...]}`. A failure is
`{"error": ...}`, or `{"busy": true}` where an earlier push still writes, and the end.

Python >= 3.8, standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes a tenth of the start
    from typing import Any, Iterator

BUFFER = 1 << 20
MAX_LINE = 1 << 24
CONFIRM_BYTES = 256 << 10
PIECE = 128 << 10
FLUSH_BYTES = 32 << 20
ZEROS = bytes(1 << 16)


class StillWritten(Exception):
    """An earlier push, whose connection was cut, has not noticed that yet."""


def say(answer: dict[str, Any]) -> None:
    """Write one line."""
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Agent:
    """One session for one folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.data = bytearray(BUFFER)
        self.low = self.high = 0
        self.folders: set[str] = set()
        self.written: list[str] = []
        self.files = self.bytes = 0
        self.told = (0, 0)
        self.bad: list[int] = []

    # ----------------------------------------------------------------------------------------------------------- stdin

    def fill(self) -> None:
        """Read more; before waiting, confirm what was done."""
        if self.low == self.high:
            self.low = self.high = 0
        elif self.high == len(self.data):
            left = self.data[self.low :]
            self.data[: len(left)] = left
            self.low, self.high = 0, len(left)
            if self.high == len(self.data):
                self.data += bytes(len(self.data))
        if self.bytes - self.told[1] >= CONFIRM_BYTES:
            self.confirm()
        while not self.read():
            self.confirm()
            select.select([0], [], [])

    def read(self) -> bool:
        """Read what is there; False when nothing is."""
        try:
            with memoryview(self.data) as view:
                count = os.readv(0, [view[self.high :]])
        except BlockingIOError:
            return False
        if not count:
            sys.exit(0)  # the connection was cut, or nothing more comes
        self.high += count
        return True

    def confirm(self) -> None:
        """Report what was done since the last time."""
        if self.told != (self.files, self.bytes):
            say({"done": self.files, "bytes": self.bytes, "bad": self.bad})
            self.told, self.bad = (self.files, self.bytes), []

    def line(self) -> bytes:
        """Return the next line."""
        seen = self.low
        while True:
            end = self.data.find(b"\n", seen, self.high)
            if end >= 0:
                found = bytes(self.data[self.low : end])
                self.low = end + 1
                return found
            if self.high - self.low > MAX_LINE:
                raise ValueError("a line without end")
            waiting = self.high - self.low
            self.fill()
            seen = self.low + waiting

    def pieces(self, count: int) -> Iterator[memoryview]:
        """Yield the next `count` bytes."""
        while count:
            if self.low == self.high:
                self.fill()
            while self.high - self.low < min(count, PIECE) and self.high < len(self.data) and self.read():
                pass
            size = min(count, self.high - self.low)
            with memoryview(self.data) as view, view[self.low : self.low + size] as piece:
                yield piece
            self.low += size
            self.bytes += size
            count -= size

    # ----------------------------------------------------------------------------------------------------------- files

    def place(self, name: str) -> str:
        """Return a file's path, with its folders created. Raises `ValueError` for a name or link that leaves."""
        folder, _, last = name.rpartition("/")
        if folder not in self.folders or last in ("", ".", "..") or "\0" in last:
            parts = name.split("/")
            if any(part in ("", ".", "..") or "\0" in part for part in parts):
                raise ValueError(f"the name {name!r} leaves the folder")
            path = self.root
            for part in parts[:-1]:
                path = path + "/" + part
                if not os.path.isdir(path):
                    os.makedirs(path, exist_ok=True)
                if os.path.islink(path):
                    raise ValueError(f"{path!r} is a link")
            self.folders.add(folder)
        return self.root + "/" + name

    def part_of(self, name: str, key: str) -> str:
        """Return the path of a file's part."""
        folder, last = os.path.split(self.place(name))
        if not key.isalnum():
            raise ValueError(f"the key {key!r} is not plain")
        return f"{folder}/.{last[:60]}.{key}.part"

    def file(self, name: str, size: int, sha256: str) -> None:
        """Take one small file."""
        path = self.place(name)
        content = b"".join([bytes(piece) for piece in self.pieces(size)])
        if hashlib.sha256(content).hexdigest() != sha256:
            self.bad.append(self.files)
            return
        folder, last = path.rsplit("/", 1)
        draft = f"{folder}/.{last[:60]}.{os.getpid()}.part"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                write(fd, content)
            finally:
                os.close(fd)
            os.rename(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
        self.written.append(path)

    def part(self, name: str, size: int, key: str, offset: int) -> None:
        """Take one file, or the rest of one, piece by piece."""
        path, part = self.place(name), self.part_of(name, key)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StillWritten from None
            except OSError:
                pass  # a file system without locks
            if os.fstat(fd).st_size != offset:
                raise StillWritten
            sha, at, flushed = hashed(fd), offset, offset
            while True:
                kind, _, word = self.line().partition(b" ")
                if kind == b"E":
                    break
                count = int(word)
                if kind not in (b"D", b"Z") or not 0 <= count <= size - at:
                    raise ValueError("an invalid piece")
                if kind == b"Z":
                    for start in range(0, count, len(ZEROS)):
                        sha.update(ZEROS[: count - start])
                    os.ftruncate(fd, at + count)
                    os.lseek(fd, at + count, os.SEEK_SET)
                    say({})
                else:
                    for piece in self.pieces(count):
                        sha.update(piece)
                        write(fd, piece)
                at += count
                if at - flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                    # Linux begins to write a range that is marked as not needed, so that the end waits briefly.
                    os.posix_fadvise(fd, flushed, at - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = at
            right = at == size and sha.hexdigest() == word.decode("ascii")
        finally:
            os.close(fd)
        if right:
            os.rename(part, path)
            self.written.append(path)
        else:
            os.unlink(part)
            self.bad.append(self.files)

    def state(self, name: str, size: int, key: str) -> list[Any]:
        """Return whether a file of this size is there, and how much of its part."""
        return [size_of(self.place(name)) == size, max(size_of(self.part_of(name, key)), 0)]

    def digest(self, name: str) -> str:
        """Return a file's digest; empty for something else."""
        path = self.place(name)
        if size_of(path) < 0:
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return str(hashed(fd).hexdigest())
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Make what was written durable: a few files each, many by their file system."""
        if len(self.written) > 64:
            os.sync()
        else:
            for path in self.written + sorted(set(map(os.path.dirname, self.written))):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    # -------------------------------------------------------------------------------------------------------- requests

    def serve(self) -> None:
        """Carry out requests until stdin closes."""
        fresh = not os.path.isdir(self.root) or not os.listdir(self.root)
        os.makedirs(self.root, exist_ok=True)
        disk = os.statvfs(self.root)
        inodes = disk.f_favail if disk.f_files else None
        say({"fresh": fresh, "free": disk.f_bavail * disk.f_frsize, "inodes": inodes})
        while True:
            request = json.loads(self.line())
            if "file" in request:
                self.file(*request["file"])
                self.files += 1
            elif "part" in request:
                self.part(*request["part"])
                self.files += 1
            elif "ask" in request:
                say({"have": [self.state(*row) for row in request["ask"]]})
            elif "digest" in request:
                say({"sha256": [self.digest(name) for name in request["digest"]]})
            else:
                self.confirm()
                self.sync()
                say({"synced": True})


def size_of(path: str) -> int:
    """Return the size of a regular file; -1 for anything else."""
    try:
        info = os.lstat(path)
    except OSError:
        return -1
    return info.st_size if stat.S_ISREG(info.st_mode) else -1


def hashed(fd: int) -> Any:
    """Hash a file, and leave its offset at the end. An empty line goes out now and then: it may take long."""
    sha, buffer, count = hashlib.sha256(), memoryview(bytearray(1 << 18)), 0
    while True:
        got = os.readv(fd, [buffer])
        if not got:
            return sha
        sha.update(buffer[:got])
        count += got
        if count >= 1 << 30:
            count = 0
            say({})


def write(fd: int, data: Any) -> None:
    """Write all of it."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, data[done:])


def main(root: str) -> None:
    """Answer until stdin closes; a failure is the last line."""
    os.umask(0o077)
    os.set_blocking(0, False)
    try:
        Agent(root).serve()
    except StillWritten:
        say({"busy": True})
    except OSError as error:
        say({"error": f"{error.strerror}: {error.filename or root}"})
    except (ValueError, TypeError, KeyError, IndexError) as error:
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(sys.argv[1])
