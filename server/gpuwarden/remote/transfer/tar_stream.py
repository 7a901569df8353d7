"""Many small files as one tar stream.

The remote side packs an explicit roster and names each member by its number in that roster, so no name from there
is ever used: a member without a known number, of another size or kind than announced, is dropped. A member has in its
link name, which a file doesn't use, its digest and times as the machine saw them while it packed. A file that can't be
packed is simply not in the stream; it is asked for alone afterwards, which says why.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Artifact
from gpuwarden.core.safe_names import UnsafeName
from gpuwarden.remote.transfer.destination import Entry, bare
from gpuwarden.remote.transfer.partial_file import set_time
from gpuwarden.remote.transfer.staging_tree import Tree

SMALL_BYTES = 1 << 20
BATCH_FILES = 20_000
BATCH_BYTES = 64 << 20
_BLOCK = 512
_HEADER = struct.Struct("100s24x12s20xs100s5s250x")  # name, size, kind, link, magic
_TIMES_BY_FD = os.utime in os.supports_fd
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Cut a roster into bundles of bounded number and size: each costs a start of Python on the machine."""
    cuts, size = [0], 0
    for at, (artifact, _) in enumerate(entries):
        if at - cuts[-1] >= BATCH_FILES or (size and size + artifact.size > BATCH_BYTES):
            cuts.append(at)
            size = 0
        size += artifact.size
    cuts.append(len(entries))
    yield from (entries[a:b] for a, b in pairwise(cuts) if a < b)


class Unpacker:
    """Reads a tar stream piece by piece and writes what is right into a tree. Blocking.

    `wanted` has the files by the numbers that they have in the stream, which has no others than `sent`. `landed` has
    the number of each file that came and its hex sha256, which the machine had as well.
    """

    def __init__(self, wanted: Mapping[int, Entry], tree: Tree, sent: Iterable[Artifact]) -> None:
        self.wanted = {b"%d" % number: (number, *entry) for number, entry in wanted.items()}
        self.tree = tree
        self.landed: dict[int, str] = {}
        self.ended = False
        self._buffer = bytearray()
        self._left = sum(artifact.size + 4 * _BLOCK for artifact in sent) + SMALL_BYTES

    def feed(self, chunk: bytes) -> int:
        """Take the next piece; return how many bytes of files it completed. Raises `BadReply` for no tar, or no end."""
        self._left -= len(chunk)
        if self._left < 0:
            raise BadReply("the machine's bundle is longer than the files that were asked for", "Pull again.")
        self._buffer += chunk
        at = taken = 0
        with memoryview(self._buffer) as view:
            while not self.ended and len(view) - at >= _BLOCK:
                if not view[at] and not any(view[at : at + _BLOCK]):
                    self.ended = True
                    break
                name, size, link = _read_header(view, at)
                end = at + _BLOCK + size
                if len(view) < end + (-size % _BLOCK):
                    break
                found = self.wanted.get(name)
                if found:
                    taken += self._land(*found, link, view[at + _BLOCK : end])
                at = end + (-size % _BLOCK)
        del self._buffer[:at]
        return taken

    def _land(self, number: int, artifact: Artifact, name: PurePosixPath, link: bytes, content: memoryview) -> int:
        sha256 = hashlib.sha256(content).hexdigest()
        if artifact.sha256:
            right = sha256 == bare(artifact.sha256)
        else:  # the digest that the machine made while it packed, of the file that is in the roster
            right = link == b"%s %x %x" % (sha256.encode(), artifact.mtime_ns, artifact.ctime_ns)
        if not right or len(content) != artifact.size:
            return 0
        try:
            path = self.tree.place(name)
        except UnsafeName:
            return 0  # taken alone, it says why
        fd = os.open(path, _WRITE, 0o666)
        try:
            while content:
                content = content[os.write(fd, content) :]
            set_time(fd if _TIMES_BY_FD else path, artifact.mtime_ns)
        finally:
            os.close(fd)
        self.landed[number] = sha256
        return artifact.size


def _read_header(view: memoryview, at: int) -> tuple[bytes, int, bytes]:
    """Return a member's name, size and link. Anything but a regular file gets an unknown name.

    Its checksum is not read: the content's digest is stronger, and a sum of 512 numbers is slow.
    """
    name, octal, kind, link, magic = _HEADER.unpack_from(view, at)
    try:
        size = int(octal.strip(b"\0 "), 8)
    except ValueError:
        raise BadReply("the machine's bundle is not a tar stream", "Pull again.") from None
    if magic != b"ustar" or not 0 <= size <= SMALL_BYTES:
        raise BadReply("the machine's bundle is not a tar stream, or contains a large file", "Pull again.")
    return name.rstrip(b"\0") if kind in b"0\0" else b"", size, link.rstrip(b"\0")
