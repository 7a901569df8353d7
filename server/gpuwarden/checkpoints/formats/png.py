"""Read PNG images, such as plots and samples: check the signature and the CRC of every chunk."""

from __future__ import annotations

import zlib

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits
from gpuwarden.checkpoints.safe_file import Source

NAME = "png"
LOAD = "parsed"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIECE = 1 << 20


def claims(name: str, head: bytes) -> bool:
    """Return true for PNG file names. The content is ignored."""
    return name.lower().endswith((".png", ".apng"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the chunks in order. Raises Broken for an invalid image, Doubtful if other bytes follow."""
    if source.head(8) != _SIGNATURE:
        raise Broken("is not a PNG image, despite its name")
    found, at, seen = Anatomy(NAME), 8, 0
    kind = b""
    while kind != b"IEND":
        head = source.at(at, 8)
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if seen == 0 and (kind != b"IHDR" or length != 13):
            raise Broken("does not begin with an image header")
        crc, end = 0, at + 8 + length
        for part in range(at + 4, end, _PIECE):
            crc = zlib.crc32(source.at(part, min(_PIECE, end - part)), crc)
        if crc != int.from_bytes(source.at(end, 4), "big"):
            raise Broken(f"the CRC of its chunk {seen + 1:,} does not match")
        at, seen = end + 4, seen + 1
        if seen > limits.members:
            raise Broken(f"has more than {limits.members:,} chunks")
    if at != source.size:
        raise Doubtful(f"{source.size - at:,} bytes follow the end of the image")
    found.proved.append(f"the CRCs of all {seen:,} chunks match")
    return found
