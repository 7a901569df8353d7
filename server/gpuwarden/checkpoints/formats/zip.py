"""Read plain zip archives of results: every member's CRC is checked within limits, but not its content.

An archive whose members may be weights remains unknown. Formats that are zip archives with other endings take
precedence.
"""

from __future__ import annotations

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Unread, some
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import heuristics

NAME = "zip"
LOAD = "parsed"


def claims(name: str, head: bytes) -> bool:
    """Return true by name alone, since files of many formats begin like a zip archive."""
    return name.lower().endswith(".zip")


def read(source: Source, limits: Limits) -> Anatomy:
    """Check the directory and every member's location. Raises Unread for unusual archives that are not cut off."""
    try:
        members = zips.members(source, limits)
    except Broken as why:
        if zips.ends_whole(source):
            raise Unread(f"is a zip archive of an unsupported kind: {why}") from why
        raise
    found = Anatomy(NAME)
    found.spans += [zips.span(m) for m in members.values() if m.stored]
    packed = [m for m in members.values() if not m.stored]

    def unpack() -> None:
        zips.unpackable(source, packed, limits)
        for m in packed:
            for _ in zips.inflate(source, m, limits):
                pass
        found.proved.append(f"the CRC of {len(packed):,} compressed members matches")

    if packed:
        found.later.append(unpack)
    found.proved.append(f"its directory lists {len(members):,} members, and all of them exist")
    found.unproved.append("the content of its members: they are not examined")
    weights = [m.name for m in members.values() if heuristics.like_weights(m.name, b"", m.size)]
    if weights:
        found.doubts.append(f"may contain weights, which are not examined inside an archive: {some(weights)}")
    return found
