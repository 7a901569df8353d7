"""Receive files as one stream on the remote machine, and confirm the files that were written.

    python -I -c SOURCE FOLDER

The first output line describes the folder: `{"fresh": BOOL, "free": BYTES, "inodes": N}`. stdin is a sequence of
requests. Two kinds of request are plain text, because small files need only these two, and importing `json` takes a
third of the start time:

- `files n`: n bytes with the name, size and sha256 of many small files, separated by NUL, and then their contents. A
  file with the right digest is written under its name.
- `sync`: sync all files, then reply `{"synced": true}`.

The other requests are lines of JSON:

- `{"ask": [[name, size, key], ...]}`: reply `{"have": [[same, part], ...]}`: whether a file of that size exists, and
  the number of bytes in its part.
- `{"digest": [name, ...]}`: reply `{"sha256": [hex, ...]}`; a digest is empty if the name is not a regular file.
- `{"part": [name, size, key, offset]}`, followed by pieces: `D n` and n bytes, `Z n` for a hole, `E sha256` at the end.
  The part is renamed if its digest is right, and otherwise deleted.

`{"done": files, "bytes": n, "bad": [number, ...]}` regularly confirms finished work. After a failure, the last line is
`{"error": ...}`, or `{"busy": true}` if an earlier push is still writing.

Python >= 3.8, standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would increase the start time by a tenth
    from typing import Any, Iterator

BUFFER = 1 << 20
MAX_LINE = 1 << 24
CONFIRM_BYTES = 256 << 10
PIECE = 128 << 10
FLUSH_BYTES = 32 << 20
ZEROS = bytes(1 << 16)
MANY = 64
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DRAFT = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class StillWritten(Exception):
    """An earlier push is still writing, because it has not noticed that its connection was lost."""


def write_line(answer: str) -> None:
    """Write one line to stdout."""
    data = answer.encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class Agent:
    """A session that receives files into one folder."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.data = bytearray(BUFFER)
        self.low = self.high = 0
        self.draft = f".{os.getpid()}.part"
        self.folder, self.at = "", -1
        self.written: list[str] = []
        self.files = self.bytes = 0
        self.reported = (0, 0)
        self.bad: list[int] = []

    # ----------------------------------------------------------------------------------------------------------- stdin

    def fill(self) -> None:
        """Read more input. Confirm finished work before waiting."""
        if self.low == self.high:
            self.low = self.high = 0
        elif self.high == len(self.data):
            left = self.data[self.low :]
            self.data[: len(left)] = left
            self.low, self.high = 0, len(left)
            if self.high == len(self.data):
                self.data += bytes(len(self.data))
        if self.bytes - self.reported[1] >= CONFIRM_BYTES:
            self.confirm()
        while not self.read():
            self.confirm()
            select.select([0], [], [])

    def read(self) -> bool:
        """Read the available input; return False if none is available."""
        try:
            with memoryview(self.data) as view:
                count = os.readv(0, [view[self.high :]])
        except BlockingIOError:
            return False
        if not count:
            os._exit(0)  # end of input or lost connection; this is faster than a normal exit
        self.high += count
        return True

    def confirm(self) -> None:
        """Report the work finished since the last confirmation."""
        if self.reported != (self.files, self.bytes):
            write_line(f'{{"done": {self.files}, "bytes": {self.bytes}, "bad": {self.bad}}}')
            self.reported, self.bad = (self.files, self.bytes), []

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
                raise ValueError("a line is too long")
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

    def enter(self, name: str) -> str:
        """Open a file's folder (descriptor `at`), creating it if necessary. Return the file's name in the folder.

        Raises `ValueError` for a name or link that points outside the root.
        """
        folder, _, last = name.rpartition("/")
        if last in ("", ".", "..") or "\0" in last or name.startswith("/"):
            raise ValueError(f"the name {name!r} is outside the folder")
        if folder != self.folder or self.at < 0:
            at = self.open_folder(name.split("/")[:-1])
            self.leave()
            self.folder, self.at = folder, at
        return last

    def open_folder(self, parts: list[str]) -> int:
        """Return the descriptor of a folder under the root, creating missing folders. Links are not followed."""
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise ValueError(f"the name {'/'.join(parts)!r} is outside the folder")
        at, path = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), self.root
        try:
            for part in parts:
                path = path + "/" + part
                try:
                    os.mkdir(part, dir_fd=at)
                except FileExistsError:
                    if os.path.islink(path):
                        raise ValueError(f"{path!r} is a link") from None
                nearer = os.open(part, FOLDER, dir_fd=at)
                os.close(at)
                at = nearer
        except BaseException:
            os.close(at)
            raise
        return at

    def leave(self) -> None:
        """Close the current folder."""
        if self.at >= 0:
            os.close(self.at)
            self.at = -1

    def part_of(self, last: str, key: str) -> str:
        """Return the name of the part file for a file."""
        if not key.isalnum():
            raise ValueError(f"the key {key!r} is not alphanumeric")
        return f".{last[:60]}.{key}.part"

    def note(self, name: str) -> None:
        """Record a file for `sync`. More than `MANY` files are synced together."""
        if len(self.written) <= MANY:
            self.written.append(self.root + "/" + name)

    def take(self, count: int) -> bytearray:
        """Return the next `count` bytes."""
        if not 0 <= count <= MAX_LINE:
            raise ValueError("an invalid size")
        while self.high - self.low < count:
            self.fill()
        found = self.data[self.low : self.low + count]
        self.low += count
        return found

    def take_files(self, head: int) -> None:
        """Receive a batch of small files. `head` is the size of the batch's header in bytes."""
        words = os.fsdecode(bytes(self.take(head))).split("\0")
        for name, size, sha256 in zip(words[::3], words[1::3], words[2::3]):  # noqa: B905
            last, content = self.enter(name), self.take(int(size))
            self.bytes += len(content)
            if hashlib.sha256(content).hexdigest() == sha256:
                self.write_file(last, content)
                self.note(name)
            else:
                self.bad.append(self.files)
            self.files += 1

    def write_file(self, last: str, content: bytearray) -> None:
        """Write a small file atomically."""
        fd = os.open(self.draft, DRAFT, 0o600, dir_fd=self.at)
        try:
            try:
                write(fd, content)
            finally:
                os.close(fd)
            os.rename(self.draft, last, src_dir_fd=self.at, dst_dir_fd=self.at)
        except BaseException:
            os.unlink(self.draft, dir_fd=self.at)
            raise

    def part(self, name: str, size: int, key: str, offset: int) -> None:
        """Receive one file piece by piece, starting at `offset`."""
        last = self.enter(name)
        part = self.part_of(last, key)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.at)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StillWritten from None
            except OSError:
                pass  # the file system does not support locks
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
                    write_line("{}")
                else:
                    for piece in self.pieces(count):
                        sha.update(piece)
                        write(fd, piece)
                at += count
                if at - flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                    # Linux starts writing a range to disk when it is marked as not needed, so the sync is faster.
                    os.posix_fadvise(fd, flushed, at - flushed, os.POSIX_FADV_DONTNEED)
                    flushed = at
            right = at == size and sha.hexdigest() == word.decode("ascii")
        finally:
            os.close(fd)
        if right:
            os.rename(part, last, src_dir_fd=self.at, dst_dir_fd=self.at)
            self.note(name)
        else:
            os.unlink(part, dir_fd=self.at)
            self.bad.append(self.files)

    def state(self, name: str, size: int, key: str) -> list[Any]:
        """Return whether a file with this size exists, and the size of its part."""
        last = self.enter(name)
        return [size_of(last, self.at) == size, max(size_of(self.part_of(last, key), self.at), 0)]

    def digest(self, name: str) -> str:
        """Return a file's hex digest; empty if the name is not a regular file."""
        last = self.enter(name)
        if size_of(last, self.at) < 0:
            return ""
        fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.at)
        try:
            return str(hashed(fd).hexdigest())
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Sync the written files: individually if there are at most `MANY`, otherwise with one `os.sync`."""
        if len(self.written) > MANY:
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
        """Process requests until stdin closes."""
        fresh = not os.path.isdir(self.root) or not os.listdir(self.root)
        os.makedirs(self.root, exist_ok=True)
        disk = os.statvfs(self.root)
        free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail if disk.f_files else "null"
        write_line(f'{{"fresh": {str(fresh).lower()}, "free": {free}, "inodes": {inodes}}}')
        while True:
            request = self.line()
            word, _, number = request.partition(b" ")
            if word == b"files":
                self.take_files(int(number))
            elif word == b"sync":
                self.confirm()
                self.sync()
                write_line('{"synced": true}')
            else:
                self.answer(request)

    def answer(self, line: bytes) -> None:
        """Process a JSON request."""
        import json

        request = json.loads(line)
        if "part" in request:
            self.part(*request["part"])
            self.files += 1
        elif "ask" in request:
            write_line(json.dumps({"have": [self.state(*row) for row in request["ask"]]}))
        else:
            write_line(json.dumps({"sha256": [self.digest(name) for name in request["digest"]]}))


def size_of(name: str, at: int) -> int:
    """Return the size of a regular file; -1 for anything else."""
    try:
        info = os.lstat(name, dir_fd=at)
    except OSError:
        return -1
    return info.st_size if stat.S_ISREG(info.st_mode) else -1


def hashed(fd: int) -> Any:
    """Hash an open file to its end, and return the hash object. Print `{}` after each GiB to show progress."""
    sha, buffer, count = hashlib.sha256(), memoryview(bytearray(1 << 18)), 0
    while True:
        got = os.readv(fd, [buffer])
        if not got:
            return sha
        sha.update(buffer[:got])
        count += got
        if count >= 1 << 30:
            count = 0
            write_line("{}")


def write(fd: int, data: Any) -> None:
    """Write all of `data`."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, data[done:])


def main(root: str) -> None:
    """Serve requests until stdin closes. Report a failure in the last output line."""
    os.umask(0o077)
    os.set_blocking(0, False)
    error = ""
    try:
        Agent(root).serve()
    except StillWritten:
        write_line('{"busy": true}')
    except OSError as problem:
        error = f"{problem.strerror}: {problem.filename or root}"
    except (ValueError, TypeError, KeyError, IndexError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error:
        import json

        write_line(json.dumps({"error": error}))


if __name__ == "__main__":
    main(sys.argv[1])
