"""Many small files as one tar stream.

The remote side packs an explicit roster and names each member by its number in that roster, so no name from there
is ever used: a member without a known number, of another size or kind than announced, is dropped. A member has in its
link name, which a file doesn't use, its digest and times as the machine saw them while it packed. A file that can't be
packed is simply not in the stream; it is asked for alone afterwards, which says why.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    `landed` has the number of each such file and its hex sha256, which the machine had as well.
    """

    def __init__(self, wanted: Sequence[Entry], tree: Tree) -> None:
        self.wanted = wanted
        self.tree = tree
        self.landed: dict[int, str] = {}
        self.ended = False
        self._buffer = bytearray()
        self._left = sum(artifact.size + 4 * _BLOCK for artifact, _ in wanted) + SMALL_BYTES

    def feed(self, chunk: bytes) -> int:
        """Take the next piece; return how many bytes of files it completed. Raises `BadReply` for no tar, or no end."""
        self._left -= len(chunk)
        if self._left < 0:
            raise BadReply("the machine's bundle is longer than the files that were asked for", "Pull again.")
        self._buffer += chunk
        at = taken = 0
        with memoryview(self._buffer) as view:
            while not self.ended and len(view) - at >= _BLOCK:
                member = _read_header(bytes(view[at : at + _BLOCK]))
                if member is None:
                    self.ended = True
                    break
                end = at + _BLOCK + member.size
                if len(view) < end + (-member.size % _BLOCK):
                    break
                taken += self._land(member, view[at + _BLOCK : end])
                at = end + (-member.size % _BLOCK)
        del self._buffer[:at]
        return taken

    def _land(self, member: _Member, content: memoryview) -> int:
        number = int(member.name) if member.name.isdigit() else -1
        if not 0 <= number < len(self.wanted):
            return 0
        artifact, name = self.wanted[number]
        sha256 = hashlib.sha256(content).hexdigest()
        if len(content) != artifact.size or sha256 != (bare(artifact.sha256 or "") or member.sealed(artifact)):
            return 0
        try:
            path = self.tree.place(name)
        except UnsafeName:
            return 0  # taken alone, it says why
        fd = os.open(path, _WRITE, 0o666)
        try:
            while content:
                content = content[os.write(fd, content) :]
            set_time(fd if os.utime in os.supports_fd else path, artifact.mtime_ns)
        finally:
            os.close(fd)
        self.landed[number] = sha256
        return artifact.size


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    size: int
    link: bytes

    def sealed(self, artifact: Artifact) -> str:
        """Return the digest that the machine put on it; empty where it has none, or packed a later file than
        `artifact`.
        """
        try:
            sha256, mtime, ctime = self.link.rstrip(b"\0").decode("ascii").split(" ")
            same = (int(mtime, 16), int(ctime, 16)) == (artifact.mtime_ns, artifact.ctime_ns)
        except ValueError:
            return ""
        return sha256 if same else ""


def _read_header(block: bytes) -> _Member | None:
    """Return a member's name, size and link; None for the zeros at the end. Anything but a regular file gets an unknown
    name. Its checksum is not read: the content's digest is stronger, and a sum of 512 numbers is slow.
    """
    if not any(block):
        return None
    try:
        size = int(block[124:136].strip(b"\0 "), 8)
    except ValueError:
        raise BadReply("the machine's bundle is not a tar stream", "Pull again.") from None
    if block[257:262] != b"ustar" or not 0 <= size <= SMALL_BYTES:
        raise BadReply("the machine's bundle is not a tar stream, or contains a large file", "Pull again.")
    return _Member(block[:100].rstrip(b"\0") if block[156:157] in b"0\0" else b"", size, block[157:257])
