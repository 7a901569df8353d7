"""Many small files as one tar stream.

The far side packs an explicit roster and names each member by its number in that roster, so no name from there
is ever used: a member without a number of ours, of another size or kind than announced, is dropped. A file that
can't be packed is simply not in the stream; it is asked for alone afterwards, which says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Artifact
from gpuwarden.remote.destination import Entry, bare
from gpuwarden.remote.part import part_name, set_time, sync_folder

SMALL_BYTES = 1 << 20
BATCH_FILES = 2000
BATCH_BYTES = 64 << 20
_BLOCK = tarfile.BLOCKSIZE


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Cut a roster into bundles of bounded number and size; a cut line costs no more than one of them."""
    cuts, size = [0], 0
    for at, (artifact, _) in enumerate(entries):
        if at - cuts[-1] >= BATCH_FILES or (size and size + artifact.size > BATCH_BYTES):
            cuts.append(at)
            size = 0
        size += artifact.size
    cuts.append(len(entries))
    yield from (entries[a:b] for a, b in pairwise(cuts) if a < b)


class Unpacker:
    """Reads a tar stream piece by piece and writes what is right as complete parts. Blocking."""

    def __init__(self, artifacts: Sequence[Artifact], staging: Path) -> None:
        self.artifacts = artifacts
        self.staging = staging
        self.landed: dict[int, Path] = {}
        self.ended = False
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> int:
        """Take the next piece and return how many bytes of files it completed. Raises `BadReply` for no tar."""
        self._buffer += chunk
        at = taken = 0
        with memoryview(self._buffer) as view:
            while not self.ended and len(view) - at >= _BLOCK:
                member = _header(bytes(view[at : at + _BLOCK]))
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

    def _land(self, member: tarfile.TarInfo, content: memoryview) -> int:
        number = int(member.name) if member.name.isascii() and member.name.isdigit() else -1
        if not 0 <= number < len(self.artifacts) or not member.isreg():
            return 0
        artifact = self.artifacts[number]
        if len(content) != artifact.size or hashlib.sha256(content).hexdigest() != bare(artifact.sha256 or ""):
            return 0
        path = self.staging / part_name(artifact)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o666)
        with os.fdopen(fd, "wb", buffering=0) as file:
            while content:
                content = content[file.write(content) :]
        set_time(path, artifact.mtime_ns)
        self.landed[number] = path
        return artifact.size

    def settle(self) -> None:
        """Make everything that landed durable, before it gets its names."""
        sync_files(self.staging, list(self.landed.values()))


def _header(block: bytes) -> tarfile.TarInfo | None:
    """A member's header, None for the block of zeros at the end."""
    if not any(block):
        return None
    try:
        member = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
        raise BadReply(f"the machine's bundle is no tar stream: {error}", "Pull again.") from error
    if not 0 <= member.size <= SMALL_BYTES:
        raise BadReply(f"the machine's bundle holds a member of {member.size:,} bytes", "Pull again.")
    return member


def sync_files(folder: Path, files: Sequence[Path]) -> None:
    """Make files of one folder durable: with one call for all where the system has it (Linux), else each."""
    if not files:
        return
    if sys.platform == "linux" and _syncfs(folder):
        return
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _syncfs(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return bool(ctypes.CDLL(None).syncfs(fd) == 0)
    except (OSError, AttributeError):
        return False
    finally:
        os.close(fd)
