"""Read TensorBoard event files, to which a job appends records with a length and CRC-32C checksums."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values.crc32c import masked

NAME = "tfevents"
LOAD = "parsed"
# Record CRCs are computed for at most this many bytes, because this is slow in Python. For later records, only the
# frames are checked.
_BODY_CAP = 8 << 20


def claims(name: str, head: bytes) -> bool:
    """Return true for names such as events.out.tfevents.<time>.<host>."""
    return "tfevents" in name


def read(source: Source, limits: Limits) -> Anatomy:
    """Check every record's length and CRC. An incomplete last record, left by a killed writer, is only a warning."""
    found = Anatomy(NAME)
    at = records = summed = 0
    while at < source.size:
        if source.size - at < 12:
            found.warnings.append("its last record is incomplete, probably because the writer was killed")
            break
        head = source.at(at, 12)
        length = int.from_bytes(head[:8], "little")
        if masked(head[:8]) != int.from_bytes(head[8:], "little"):
            raise Broken(f"record {records + 1:,} at byte {at:,} does not match the CRC of its length")
        if at + 16 + length > source.size:
            found.warnings.append("its last record is incomplete, probably because the writer was killed")
            break
        if summed + length <= _BODY_CAP:
            body = source.at(at + 12, length + 4)
            if masked(body[:-4]) != int.from_bytes(body[-4:], "little"):
                raise Broken(f"record {records + 1:,} at byte {at:,} does not match its CRC")
            summed += length
        at, records = at + 16 + length, records + 1
    found.proved.append(f"{records:,} records have valid frames")
    return found
