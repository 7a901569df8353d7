"""Real xet uploads and downloads without a xet server.

hf_xet takes `local://<folder>` as the address of its store and then keeps chunks, xorbs and shards in that folder.
That scheme comes from hf_xet's own tests and is not a documented contract: if it fails, clients set
`HF_HUB_DISABLE_XET=1` and use plain LFS, which this Hub supports too.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_AT = 48  # the shard header; file entries follow in 48-byte records
_RECORD = 48
_VERIFIED, _WITH_SHA = 0x80000000, 0x40000000


class XetStore:
    """The folder that hf_xet writes to, and the lookup of its content by sha256."""

    def __init__(self, folder: Path, blobs: Path) -> None:
        self.folder = folder
        self.blobs = blobs

    def token(self, now: float) -> dict[str, Any]:
        """Return the answer of the token routes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return {"casUrl": f"local://{self.folder}", "exp": int(now) + 3600, "accessToken": "rehearsal"}

    def fetch(self, sha: str, size: int) -> str:
        """Bring an uploaded file into the blobs and return its xet hash; an empty string when it is not there."""
        for shard in sorted(self.folder.rglob("*.mdb")):
            for found_sha, xet in shard_files(shard.read_bytes()):
                if found_sha == sha and self._download(xet, sha, size):
                    return xet
        return ""

    def _download(self, xet: str, sha: str, size: int) -> bool:
        import hf_xet

        part = self.blobs / f"{sha}.xet"
        session = hf_xet.XetSession()
        with session.new_file_download_group(f"local://{self.folder}") as group:
            group.start_download_file(hf_xet.XetFileInfo(xet, size), str(part))
        if hashlib.sha256(part.read_bytes()).hexdigest() != sha:
            part.unlink()
            return False
        shutil.move(part, self.blobs / sha)
        return True


def shard_files(shard: bytes) -> Iterator[tuple[str, str]]:
    """Yield the (sha256, xet hash) pairs of a shard's file section."""
    at = _HEADER_AT
    while at + _RECORD <= len(shard):
        record = shard[at : at + _RECORD]
        flags, entries = struct.unpack_from("<II", record, 32)
        if record[:32] == b"\xff" * 32:
            return
        at += _RECORD * (1 + entries * (2 if flags & _VERIFIED else 1))
        if flags & _WITH_SHA:
            yield _hex(shard[at : at + 32]), _hex(record[:32])
            at += _RECORD


def _hex(raw: bytes) -> str:
    """Return a hash as hf_xet prints it: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))
