"""Plain zip archives of results: every member's CRC, bounded, nothing is extracted. Their content is not judged.

An archive whose members may be weights stays unknown: whole, and not examined. It comes after the formats that are
zip archives themselves and have other endings.
"""

from __future__ import annotations

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Unread, some
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import heuristics

NAME = "zip"
LOAD = "parsed"


def claims(name: str, head: bytes) -> bool:
    """Return true by name alone: an unknown file that begins like an archive may be anything."""
    return name.lower().endswith(".zip")


def read(source: Source, limits: Limits) -> Anatomy:
    """Check the directory and every member's place. Raises Unread for archives that are whole and unusual."""
    try:
        members = zips.members(source, limits)
    except Broken as why:
        if zips.ends_whole(source):
            raise Unread(f"is a zip archive of a kind that is not read here: {why}") from why
        raise
    found = Anatomy(NAME)
    found.spans += [zips.span(m) for m in members.values() if m.stored]
    packed = [m for m in members.values() if not m.stored]

    def unpack() -> None:
        zips.unpackable(source, packed, limits)
        for m in packed:
            for _ in zips.inflate(source, m, limits):
                pass
        found.proved.append(f"the CRC of {len(packed):,} compressed members fits")

    if packed:
        found.later.append(unpack)
    found.proved.append(f"its directory lists {len(members):,} members, and all of them are there")
    found.unproved.append("the content of its members: they are not examined")
    weights = [m.name for m in members.values() if heuristics.like_weights(m.name, b"", m.size)]
    if weights:
        found.doubts.append(f"contains what may be weights, which are not examined inside an archive: {some(weights)}")
    return found
