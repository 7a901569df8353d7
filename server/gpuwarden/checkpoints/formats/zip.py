"""Read plain zip archives of results. Member CRCs are checked up to a size limit; member content is not examined.

If a member may contain weights, the archive's verdict is unknown. Formats that are zip archives with other extensions
have their own modules.
"""

from __future__ import annotations

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Unread, some
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import heuristics

NAME = "zip"
LOAD = "parsed"


def claims(name: str, head: bytes) -> bool:
    """Return true for the extension .zip. The content is ignored, because many other formats are also zip archives."""
    return name.lower().endswith(".zip")


def read(source: Source, limits: Limits) -> Anatomy:
    """Check the directory and the location of every member. Raises Unread for an unsupported kind of archive."""
    try:
        members = zips.members(source, limits)
    except Broken as why:
        if zips.is_complete(source):
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
        found.proved.append(f"the CRCs of {len(packed):,} compressed members match")

    if packed:
        found.later.append(unpack)
    found.proved.append(f"all {len(members):,} members in its directory exist")
    found.unproved.append("the content of its members, which is not examined")
    weights = [m.name for m in members.values() if heuristics.like_weights(m.name, b"", m.size)]
    if weights:
        found.doubts.append(f"may contain weights, which are not examined inside an archive: {some(weights)}")
    return found
