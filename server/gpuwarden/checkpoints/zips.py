"""Read zip archives strictly: an archive that two readers could read differently is rejected. Standard library only.

`zipfile` accepts irregularities that weight archives never have: bytes before, after and between members, two members
with the same name, and local headers that differ from the directory. Any of these can make two readers extract
different files.
"""

from __future__ import annotations

import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpuwarden.checkpoints.file_model import Broken, Doubtful, Limits, Span, short
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL = 0xFFFFFFFF


@dataclass(frozen=True)
class Member:
    """One file in the archive. `start` is the offset of its bytes, which may be compressed."""

    name: str
    stored: bool
    crc: int
    packed: int
    size: int
    start: int
    # True if all CRCs in the archive are zero, because the writer omitted them, as torch does on request.
    unchecked: bool = False


def members(source: Source, limits: Limits) -> dict[str, Member]:
    """Return the archive's members by name. Raises Broken for irregularities that weight archives never have."""
    count, size, offset = _directory(source)
    if count > limits.members:
        raise Doubtful(f"lists {count:,} members; more than {limits.members:,} are not examined", Cause.LIMIT)
    found: dict[str, Member] = {}
    table = source.at(offset, size)
    at = 0
    for _ in range(count):
        member, at = _entry(source, table, at, offset)
        if member.name in found:
            raise Broken(f"has two members named {short(member.name, 60)}", Cause.CONTRADICTION)
        found[member.name] = member
    if at != size:
        raise Broken("its directory is longer than its entries")
    # Members must not overlap, and only headers may separate them.
    at = 0
    for m in sorted(found.values(), key=lambda m: (m.start, m.packed)):
        head = m.start - at
        if head < _LOCAL.size + len(m.name.encode()):
            raise Broken(f"member {short(m.name, 60)} overlaps the previous member", Cause.CONTRADICTION)
        # Allow only a header, a name, an extra field (64-bit sizes, padding) and the previous member's data descriptor.
        if head > _LOCAL.size + len(m.name.encode()) + 65_535 + 24:
            raise Broken(f"{head:,} bytes before member {short(m.name, 60)} are not in any member", Cause.CONTRADICTION)
        at = m.start + m.packed
    if offset - at > 24:
        raise Broken(f"{offset - at:,} bytes before the zip directory are not in any member", Cause.CONTRADICTION)
    filled = [m for m in found.values() if m.size]
    if len(filled) > 1 and not any(m.crc for m in filled):
        return {name: replace(m, unchecked=True) for name, m in found.items()}
    return found


def is_complete(source: Source) -> bool:
    """Return true if the archive is not truncated: it has an end record, which points into the archive."""
    try:
        end, (_, _, _, _, size, offset, comment) = _end_record(source)
    except Broken:
        return False
    return source.size - end - _END.size == comment and (offset == _FULL or offset + size <= end)


def span(member: Member) -> Span:
    """Return the byte range of a stored (uncompressed) member, with its CRC."""
    return Span(member.name, member.start, member.start + member.packed, member.crc)


def read(source: Source, member: Member, cap: int) -> bytes:
    """Return the bytes of a small member after checking its CRC. Raises Doubtful if it is larger than `cap` bytes."""
    if member.size > cap:
        raise Doubtful(
            f"member {short(member.name, 60)} has {member.size:,} bytes; at most {cap:,} are read", Cause.LIMIT
        )
    data = source.at(member.start, member.packed)
    if not member.stored:
        machine = zlib.decompressobj(-15)
        try:
            data = machine.decompress(data, member.size + 1)
        except zlib.error as why:
            raise Broken(f"member {short(member.name, 60)} can't be decompressed: {why}") from why
    if len(data) != member.size:
        raise Broken(f"member {short(member.name, 60)} does not have the size that its directory entry specifies")
    if not member.unchecked and zlib.crc32(data) != member.crc:
        raise Broken(f"member {short(member.name, 60)} does not match its CRC")
    return data


def allowance(source: Source, limits: Limits) -> int:
    """Return the maximum number of bytes to unpack from an archive."""
    return max(limits.unpacked, limits.unpack_ratio * source.size)


def unpackable(source: Source, packed: Iterable[Member], limits: Limits) -> None:
    """Raise Doubtful if the compressed members exceed the archive's unpacking limit."""
    total, most = sum(m.size for m in packed), allowance(source, limits)
    if total > most:
        raise Doubtful(f"has {total:,} bytes when unpacked; at most {most:,} are unpacked", Cause.LIMIT)


def inflate(source: Source, member: Member, limits: Limits) -> Iterator[bytes]:
    """Yield a compressed member in pieces, so that zip bombs can't exhaust memory. Check size and CRC at the end."""
    if member.size > limits.inflate_ratio * max(member.packed, 1):
        raise Broken(
            f"member {short(member.name, 60)} stores {member.size:,} bytes in {member.packed:,}, which is impossible",
            Cause.CONTRADICTION,
        )
    if member.size > allowance(source, limits):
        raise Doubtful(
            f"member {short(member.name, 60)} stores {member.size:,} bytes in {member.packed:,}; it is not unpacked",
            Cause.LIMIT,
        )
    machine, crc, size, at, pending = zlib.decompressobj(-15), 0, 0, 0, b""
    out = b""
    # After the last input, zlib may have more output left than one call returns.
    while not machine.eof and (at < member.packed or pending or out):
        if not pending and at < member.packed:
            pending = source.at(member.start + at, min(1 << 18, member.packed - at))
            at += len(pending)
        try:
            out = machine.decompress(pending, 1 << 20)
        except zlib.error as why:
            raise Broken(f"member {short(member.name, 60)} can't be decompressed: {why}") from why
        pending = machine.unconsumed_tail
        crc, size = zlib.crc32(out, crc), size + len(out)
        if size > member.size:
            raise Broken(f"member {short(member.name, 60)} is longer than its directory entry specifies")
        yield out
    fits = member.unchecked or crc == member.crc
    if not machine.eof or machine.unused_data or at != member.packed or size != member.size or not fits:
        raise Broken(f"member {short(member.name, 60)} does not match its size or CRC")


def _end_record(source: Source) -> tuple[int, tuple[int, ...]]:
    """Return the offset and the fields of the last end record. Raises Broken if the record is missing or incomplete."""
    if source.size < _END.size:
        raise Broken(f"has {source.size} bytes; a zip archive can't be that small")
    tail_at = max(0, source.size - _END.size - 65_535)
    tail = source.at(tail_at, source.size - tail_at)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise Broken("has no zip directory at its end, so it is truncated or was never finished")
    if len(tail) - at < _END.size:
        raise Broken("its last zip record is truncated")
    return tail_at + at, _END.unpack_from(tail, at)[1:]


def _directory(source: Source) -> tuple[int, int, int]:
    """Return (number of entries, size, offset) for the central directory."""
    end, (disk, first, here, count, size, offset, comment) = _end_record(source)
    after = source.size - end - _END.size
    if after:
        if after == comment:
            raise Doubtful(f"has a zip comment of {after:,} bytes; programs that write weights do not add one")
        raise Broken(f"{after:,} bytes after its zip directory are not in any member", Cause.CONTRADICTION)
    if disk or first or here != count:
        raise Doubtful("is marked as part of a multi-disk archive")
    narrow = (count, size, offset)
    # torch always writes the 64-bit record, even if it is not needed.
    if end >= 20 + _END64.size and source.at(end - 20, 4) == b"PK\6\7":
        _, disk, where, disks = struct.unpack("<4sLQL", source.at(end - 20, 20))
        if disk or disks > 1 or where + _END64.size != end - 20:
            raise Broken("its 64-bit zip record is at the wrong offset")
        end = where
        sign, _, _, _, disk, first, here, count, size, offset = _END64.unpack(source.at(where, _END64.size))
        if sign != b"PK\6\6" or disk or first or here != count:
            raise Broken("its 64-bit zip record is invalid")
    elif _FULL in (size, offset) or count == 0xFFFF:
        raise Broken("lacks the 64-bit zip record that its sizes require")
    if offset + size != end:
        raise Broken("its zip directory does not end at the end record")
    if size < count * _ENTRY.size:
        raise Broken(f"a directory of {size:,} bytes can't contain {count:,} entries")
    wide, full = (count, size, offset), (0xFFFF, _FULL, _FULL)
    if any(n not in (w, f) for n, w, f in zip(narrow, wide, full)):  # noqa: B905
        raise Broken("its two directory records differ", Cause.CONTRADICTION)
    return wide


def _entry(source: Source, table: bytes, at: int, limit: int) -> tuple[Member, int]:
    """Return the member that the directory entry at `at` describes, and the offset of the next entry."""
    if at + _ENTRY.size > len(table):
        raise Broken("its directory ends inside an entry")
    sign, made, _, flags, method, _, _, crc, packed, size, n, x, c, disk, _, attr, offset = _ENTRY.unpack_from(
        table, at
    )
    if sign != b"PK\1\2":
        raise Broken("its directory has an invalid entry")
    stop = at + _ENTRY.size + n + x + c
    if stop > len(table):
        raise Broken("its directory ends inside an entry")
    raw = table[at + _ENTRY.size : at + _ENTRY.size + n]
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as why:
        raise Doubtful("has a member whose name is not UTF-8") from why
    parts = name.replace("\\", "/").split("/")
    if not name or name.startswith(("/", "\\")) or ".." in parts or ":" in parts[0] or "\0" in name:
        raise Broken(
            f"has a member named {short(name, 60)!r}, which would be extracted outside the folder",
            Cause.CONTRADICTION,
        )
    if _FULL in (packed, size, offset):
        packed, size, offset = _wide(table[at + _ENTRY.size + n : stop - c], packed, size, offset)
    if flags & 1 or disk:
        raise Doubtful(f"member {short(name, 60)} is encrypted or on another disk")
    if made >> 8 == 3 and stat.S_ISLNK(attr >> 16):
        raise Broken(f"member {short(name, 60)} is a symbolic link")
    if method not in (0, 8):
        raise Doubtful(f"member {short(name, 60)} uses the unsupported compression method {method}")
    start = _local(source, raw, name, offset, method)
    if start + packed > limit:
        raise Broken(f"member {short(name, 60)} extends past the archive's data")
    if method == 0 and packed != size:
        raise Broken(f"member {short(name, 60)} is stored, but its two sizes differ", Cause.CONTRADICTION)
    return Member(name, method == 0, crc, packed, size, start), stop


def _wide(extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int, int]:
    """Return (packed size, size, offset). Values that need 64 bits are read from the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        body = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind != 1:
            continue
        values = [int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body) // 8 * 8, 8)]
        wide = []
        for narrow in (size, packed, offset):
            if narrow == _FULL and not values:
                raise Broken("a member lacks a 64-bit size that it requires")
            wide.append(values.pop(0) if narrow == _FULL else narrow)
        return wide[1], wide[0], wide[2]
    raise Broken("a member lacks a 64-bit size that it requires")


def _local(source: Source, raw: bytes, name: str, offset: int, method: int) -> int:
    """Return the offset of the member's bytes. Raises Broken if the local header and the directory differ."""
    n: int
    x: int
    sign, _, _, m, _, _, _, _, _, n, x = _LOCAL.unpack(source.at(offset, _LOCAL.size))
    if sign != b"PK\3\4":
        raise Broken(f"member {short(name, 60)} does not begin at its offset in the directory", Cause.CONTRADICTION)
    if m != method or n != len(raw) or source.at(offset + _LOCAL.size, n) != raw:
        raise Broken(
            f"member {short(name, 60)} has a different name or method in its local header", Cause.CONTRADICTION
        )
    return offset + _LOCAL.size + n + x
