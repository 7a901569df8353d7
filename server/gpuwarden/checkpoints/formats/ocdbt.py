"""Read an orbax checkpoint's OCDBT database: tables with a length and a CRC-32C, and data files without either.

Tables are checked in full. A data file has no structure to check, so it can only be verified with a recorded digest.
"""

from __future__ import annotations

import re

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values.crc32c import crc32c

NAME = "ocdbt"
LOAD = ""
_TABLES = (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde", b"\x0c\xdb\x1d\xe0")  # manifest, tree node, version node
_DATA_NAME = re.compile(r"[0-9a-f]{32}")
_CRC_CAP = 8 << 20


def claims(name: str, head: bytes) -> bool:
    """Return true for the names of manifests and data files. A data file's name consists of 32 hexadecimal digits."""
    return name.endswith(".ocdbt") or _DATA_NAME.fullmatch(name) is not None


def read(source: Source, limits: Limits) -> Anatomy:
    """Check a table's length and CRC; mark a data file as opaque."""
    found = Anatomy(NAME)
    if source.head(4) not in _TABLES and not source.name.endswith(".ocdbt"):
        found.opaque = True
        return found
    if source.size < 16 or source.head(4) not in _TABLES:
        raise Broken("is not an OCDBT table")
    stated = int.from_bytes(source.at(4, 8), "little")
    if stated != source.size:
        raise Broken(f"its header specifies {stated:,} bytes, but the file has {source.size:,}")
    if source.size > _CRC_CAP:
        raise Doubtful(f"is a table of {source.size:,} bytes; the CRC is computed for at most {_CRC_CAP:,}")
    body = source.at(0, source.size)
    if crc32c(body[:-4]) != int.from_bytes(body[-4:], "little"):
        raise Broken("does not match its CRC-32C")
    found.proved.append("is a table whose length and CRC-32C match")
    return found
