"""Receive many small files as one stream.

The remote machine sends the files of a given manifest and identifies each file by its number in that manifest, so names
from the machine are never used. A file with an unknown number or an unexpected size is dropped.

The stream consists of groups. Each group starts with a count and a row for each of its files: number, size, digest, and
the modification and change times when it was packed. The contents follow. A count of 0 ends the stream. A file
that can't be packed is left out. It is then requested separately, and that request reports the reason.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Artifact
from gpuwarden.core.safe_names import UnsafeName
from gpuwarden.remote.transfer.destination import FULL, Entry, bare
from gpuwarden.remote.transfer.partial_file import set_time
from gpuwarden.remote.transfer.staging_tree import Tree

SMALL_BYTES: Final = 1 << 20
BATCH_FILES: Final = 20_000
BATCH_BYTES: Final = 64 << 20
COUNT: Final = struct.Struct(">I")
ROW: Final = struct.Struct(">IIqq32s")
"""A file's number, its size in bytes, its mtime and ctime in nanoseconds, and its sha256."""
MOST: Final = 1 << 16
_TIMES_BY_FD = os.utime in os.supports_fd
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Split files into as few bundles as the limits allow, because the machine starts Python to unpack each bundle."""
    cuts, size = [0], 0
    for at, (artifact, _) in enumerate(entries):
        if at - cuts[-1] >= BATCH_FILES or (size and size + artifact.size > BATCH_BYTES):
            cuts.append(at)
            size = 0
        size += artifact.size
    cuts.append(len(entries))
    yield from (entries[a:b] for a, b in pairwise(cuts) if a < b)


class Unpacker:
    """Reads a bundle piece by piece and writes verified files into a tree. All calls block.

    `wanted` maps numbers in the stream to files; `sent` lists all files that the stream may contain. `landed` maps the
    number of each received file to its hex sha256, which equals the digest on the machine.
    """

    def __init__(self, wanted: Mapping[int, Entry], tree: Tree, sent: Iterable[Artifact]) -> None:
        self.wanted = wanted
        self.tree = tree
        self.landed: dict[int, str] = {}
        self.ended = False
        self._buffer = bytearray()
        self._rows: deque[tuple[int, int, int, int, bytes]] = deque()
        self._left = sum(artifact.size + COUNT.size + ROW.size for artifact in sent) + SMALL_BYTES

    def feed(self, chunk: bytes) -> int:
        """Process the next piece. Return the total size in bytes of the files that the piece completed.

        Raises `BadReply` if the stream is invalid or longer than the requested files.
        """
        self._left -= len(chunk)
        if self._left < 0:
            raise BadReply("the machine's bundle is longer than the requested files", "Pull again.")
        self._buffer += chunk
        at = taken = 0
        with memoryview(self._buffer) as view:
            while not self.ended:
                if not self._rows:
                    end = self._read_rows(view, at)
                    if end == at:
                        break
                    at = end
                elif len(view) - at < self._rows[0][1]:
                    break
                else:
                    row = self._rows.popleft()
                    with view[at : at + row[1]] as content:
                        taken += self._land(row, content)
                    at += row[1]
        del self._buffer[:at]
        return taken

    def _read_rows(self, view: memoryview, at: int) -> int:
        """Read the rows of the next group; return their end, or `at` if they are incomplete."""
        if len(view) - at < COUNT.size:
            return at
        count = int.from_bytes(view[at : at + COUNT.size], "big")
        if count > MOST:
            raise _unreadable()
        begin, end = at + COUNT.size, at + COUNT.size + count * ROW.size
        if len(view) < end:
            return at
        self.ended = count == 0
        with view[begin:end] as rows:
            self._rows.extend(ROW.iter_unpack(rows))
        if any(row[1] > SMALL_BYTES for row in self._rows):
            raise _unreadable()
        return end

    def _land(self, row: tuple[int, int, int, int, bytes], content: memoryview) -> int:
        number, size, mtime_ns, ctime_ns, digest = row
        artifact, name = self.wanted.get(number, (None, ""))
        if artifact is None or size != artifact.size or number in self.landed:
            return 0
        sha = hashlib.sha256(content)
        if artifact.sha256:
            right = sha.hexdigest() == bare(artifact.sha256)
        else:  # use the digest that was computed while packing, if the times match the manifest
            right = sha.digest() == digest and (mtime_ns, ctime_ns) == (artifact.mtime_ns, artifact.ctime_ns)
        if not right:
            return 0
        try:
            self._write(artifact, name, content)
        except UnsafeName:
            return 0  # the file is then requested separately, and that request reports the reason
        except OSError as problem:
            if problem.errno in FULL:
                raise
            return 0  # this disk can't store the name; continue with the other files
        self.landed[number] = sha.hexdigest()
        return size

    def _write(self, artifact: Artifact, name: str, content: memoryview) -> None:
        """Write a file to the tree completely or not at all, because `Tree.publish` moves every file in it."""
        path = self.tree.place(name)
        fd = os.open(path, _WRITE, 0o666)
        try:
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:] if done else content)
            set_time(fd if _TIMES_BY_FD else path, artifact.mtime_ns)
        except OSError:
            Path(path).unlink()
            raise
        finally:
            os.close(fd)


def _unreadable() -> BadReply:
    return BadReply("the machine's bundle is invalid or contains a file that is too large", "Pull again.")
