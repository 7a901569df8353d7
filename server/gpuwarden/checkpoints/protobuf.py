"""Read protobuf's wire format without a schema; each field must end inside its parent. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.checkpoints.file_model import Broken, Doubtful
from gpuwarden.checkpoints.safe_file import Source

FIELDS = 2_000_000


class Walker:
    """Read the fields of one file, up to a maximum number."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count = 0
        self.base = 0
        self.window = b""

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Read a variable-length integer. Return (value, offset of the next byte)."""
        value = shift = 0
        for i in range(10):
            if at + i >= end:
                break
            byte = self.byte(at + i)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, at + i + 1
        raise Broken(f"its protobuf is invalid or truncated at byte {at:,}")

    def byte(self, at: int) -> int:
        """Return the byte at an offset. Up to 16 KiB are read at a time."""
        if not self.base <= at < self.base + len(self.window):
            self.base = at
            self.window = self.source.at(at, min(1 << 14, self.source.size - at))
        return self.window[at - self.base]

    def text(self, place: tuple[int, int]) -> str:
        """Return the string in a (start, end) range, truncated to 1,000 bytes."""
        begin, end = place
        return self.source.at(begin, min(end - begin, 1000)).decode("utf-8", "replace")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int | tuple[int, int]]]:
        """Yield (number, wire type, value or (start, end)) for each field between two offsets."""
        while at < end:
            self.count += 1
            if self.count > FIELDS:
                raise Doubtful(f"has more than {FIELDS:,} fields; the rest was not read")
            key, at = self.varint(at, end)
            number, wire = key >> 3, key & 7
            if not number:
                raise Broken(f"its protobuf has the invalid field number 0 near byte {at:,}")
            if wire == 0:
                value, at = self.varint(at, end)
                yield number, wire, value
                continue
            if wire == 2:
                size, at = self.varint(at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise Broken(f"its protobuf has the unknown wire type {wire} near byte {at:,}")
            if at + size > end:
                raise Broken(f"a field needs bytes up to {at + size:,}, but its parent ends at {end:,}")
            yield number, wire, (at, at + size)
            at += size
