"""Read JPEG images: check that the markers are valid and that nothing follows the image. The format has no checksum."""

from __future__ import annotations

import re

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits
from gpuwarden.checkpoints.safe_file import Source

NAME = "jpeg"
LOAD = "parsed"
_START, _END, _SCAN, _FILL = 0xD8, 0xD9, 0xDA, 0xFF
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # in a scan, FF00 is an escaped FF, and D0 to D7 are restart markers
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


def claims(name: str, head: bytes) -> bool:
    """Return true for file names with this format's extensions. The content is ignored."""
    return name.lower().endswith((".jpg", ".jpeg"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the markers in order. Raises Broken for an invalid image, Doubtful if other bytes follow."""
    if source.head(2) != bytes([0xFF, _START]):
        raise Broken("is not a JPEG image, despite its name")
    if source.size > limits.json:
        raise Doubtful(f"has {source.size:,} bytes; images above {limits.json:,} are not examined")
    data, at, frames = source.at(0, source.size), 2, 0
    while True:
        if at + 2 > len(data) or data[at] != 0xFF:
            raise Broken(f"lacks a marker at byte {at:,}, where the previous segment ends")
        kind = data[at + 1]
        if kind == _END:
            break
        frames += kind in _FRAMES
        if kind == _FILL:
            at += 1
            continue
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        end = at + 2 + length
        if length < 2 or end > len(data):
            raise Broken(f"ends inside the segment at byte {at:,}")
        if kind == _SCAN:
            marker = _MARKER.search(data, end)
            if marker is None:
                raise Broken("ends inside the image")
            end = marker.start()
        at = end
    if not frames:
        raise Broken("contains no image")
    if at + 2 != len(data):
        raise Doubtful(f"{len(data) - at - 2:,} bytes follow the end of the image")
    found = Anatomy(NAME)
    found.proved.append("its segments cover the complete file")
    return found
