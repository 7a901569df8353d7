"""Read HDF5 files (.h5, .hdf5), such as Keras weights: the superblock, the object headers and the dataset locations.

Old files have no checksums; in newer files, each block of metadata has one. This module only locates compressed data;
at level `load`, the HDF5 library reads the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, Tensor, short
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values.lookup3 import lookup3
from gpuwarden.core.evidence import Cause

NAME = "hdf5"
LOAD = "tensors"
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_NOWHERE = (1 << 64) - 1
_MESSAGES, _DEPTH, _LOOKED_INTO = 100_000, 64, 32 << 20
_SPACE, _LINKS, _TYPE, _LINK, _LAYOUT, _CONTINUED, _TABLE = 0x01, 0x02, 0x03, 0x06, 0x08, 0x10, 0x11
_FLOATS = {(2, 5): "F16", (2, 8): "BF16", (4, 8): "F32", (8, 11): "F64"}


def claims(name: str, head: bytes) -> bool:
    """Return true if a file's name or signature matches an HDF5 file."""
    return name.lower().endswith((".h5", ".hdf5")) or head.startswith(_SIGNATURE)


def read(source: Source, limits: Limits) -> Anatomy:
    """Compare the file's size with the size in the superblock, then read its groups."""
    at = next((a for a in (0, 512, 1024, 2048) if source.size >= a + 96 and source.at(a, 8) == _SIGNATURE), None)
    if at is None:
        raise Broken("does not begin with the HDF5 signature")
    walk = _Walk(source, limits, Anatomy(NAME))
    root, table = walk.superblock(at)
    if table is None:
        walk.visit(root, "", 0)
    else:
        walk.old_group(*table, "", 0)
    found = walk.found
    found.big_endian = True in walk.orders
    if len(walk.orders) > 1:
        found.doubts.append("mixes byte orders, so its values were not scanned")
    found.tensors.sort(key=lambda t: t.start)
    found.proved.append(f"{len(found.tensors):,} datasets are inside the file, and the file has the recorded size")
    _keras_code(source, found)
    apart = sum(t.start < 0 and t.dtype in _FLOATS.values() for t in found.tensors)
    if apart:
        found.unproved.append(f"whether {apart:,} chunked datasets are finite: level load reads them with h5py")
    if walk.left_out:
        found.meta["incomplete"] = True
        found.unproved.append(f"{walk.left_out:,} parts whose types only the HDF5 library can read")
    return found


def _keras_code(source: Source, found: Anatomy) -> None:
    """Search the bytes outside the datasets for a Keras model description with a layer that contains code."""
    at, budget = 0, _LOOKED_INTO
    places = [(t.start, t.start + t.extent) for t in found.tensors if t.start >= 0]
    for start, end in [*places, (source.size, source.size)]:
        piece = source.at(at, min(start - at, budget)) if start > at and budget else b""
        budget -= len(piece)
        if b'"class_name": "Lambda"' in piece or b'"class_name": "__lambda__"' in piece:
            found.doubt("has a Lambda layer; Keras would run the layer's code to load the model", Cause.NEEDS_CODE)
            return
        at = max(at, end)


@dataclass
class _Object:
    """The header messages of one object, each as (type, bytes)."""

    messages: list[tuple[int, bytes]] = field(default_factory=list)

    def get(self, kind: int) -> bytes | None:
        return next((body for k, body in self.messages if k == kind), None)


class _Walk:
    """Visit each object in a file once."""

    def __init__(self, source: Source, limits: Limits, found: Anatomy) -> None:
        self.source, self.limits, self.found = source, limits, found
        self.end = source.size
        self.seen: set[int] = set()
        self.orders: set[bool] = set()
        self.left_out = 0
        self.count = 0

    def at(self, offset: int, length: int) -> bytes:
        """Read metadata and count the reads. Addresses are file offsets, because the superblock's base must be 0."""
        self.count += 1
        if self.count > 4 * self.limits.tensors:
            raise Doubtful("has more metadata than the limit allows")
        if length > self.limits.header:
            raise Broken(f"has {length:,} bytes of metadata at byte {offset:,}")
        return self.source.at(offset, length)

    def checked(self, offset: int, length: int) -> bytes:
        """Read a block of metadata that ends with a checksum. Raises Broken if the checksum differs."""
        data = self.at(offset, length)
        if lookup3(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise Broken(f"its metadata at byte {offset:,} fails its checksum")
        return data

    def superblock(self, at: int) -> tuple[int, tuple[int, int] | None]:
        """Return the addresses of the root group's header and, in the old format, of its index and its names."""
        head = self.at(at, 96)
        version = head[8]
        widths = head[13:15] if version < 2 else head[9:11]
        if version > 3 or widths != b"\x08\x08":
            raise Doubtful(f"has an unsupported superblock: version {version}, field sizes {widths.hex()}")
        if version >= 2:
            self.checked(at, 48)
        fields = head[12:44] if version >= 2 else head[24 + 4 * version :]
        base, _, end, root = (_number(fields, i) for i in range(0, 32, 8))
        if at or base:
            raise Doubtful("begins with another program's data, which is not supported")
        if end != self.source.size:
            what = "is truncated" if end > self.source.size else "has additional bytes"
            raise Broken(f"its superblock specifies {end:,} bytes, but the file has {self.source.size:,}: it {what}")
        if version >= 2:
            return root, None
        entry = fields[32:72]
        cached = int.from_bytes(entry[16:20], "little") == 1
        return _number(entry, 8), (_number(entry, 24), _number(entry, 32)) if cached else None

    def visit(self, address: int, name: str, depth: int) -> None:
        """Read one object: the members of a group, or the location of a dataset."""
        if address in self.seen:
            return
        self.seen.add(address)
        if depth > _DEPTH or len(self.found.tensors) > self.limits.tensors:
            raise Doubtful("has more objects than the limit allows")
        thing = _Object(list(self.header(address)))
        table, space, layout, kind = (thing.get(k) for k in (_TABLE, _SPACE, _LAYOUT, _TYPE))
        if table is not None and len(table) >= 16:
            self.old_group(_number(table, 0), _number(table, 8), name, depth)
        elif layout is not None and space is not None and kind is not None:
            self.dataset(name, space, kind, layout)
        links = thing.get(_LINKS)
        # A large group in the new format stores its links in a separate heap.
        if links is not None and len(links) >= 18 and _number(links, 10 if links[1] & 1 else 2) != _NOWHERE:
            self.left_out += 1
        for kind_of, body in thing.messages:
            if kind_of == _LINK:
                child, to = _link(body)
                if to is not None:
                    self.visit(to, f"{name}/{child}".lstrip("/"), depth + 1)

    def header(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Yield the messages in an object's header and its continuation blocks, in the old or the new format."""
        new = self.at(address, 4) == b"OHDR"
        if new:
            flags = self.at(address, 6)[5]
            at = 6 + 16 * bool(flags & 0x20) + 4 * bool(flags & 0x10)
            width = 1 << (flags & 3)
            length = int.from_bytes(self.at(address + at, width), "little")
            blocks = [self.checked(address, at + width + length + 4)[at + width : -4]]
            step = 4 + 2 * bool(flags & 4)
        else:
            head = self.at(address, 16)
            if head[0] != 1:
                raise Broken(f"lacks an object at byte {address:,}, although another object points there")
            blocks, step = [self.at(address + 16, int.from_bytes(head[8:12], "little"))], 8
        count = 0
        while blocks:
            block, at = blocks.pop(0), 0
            while at + step <= len(block):
                kind = block[at] if new else int.from_bytes(block[at : at + 2], "little")
                where = at + 1 if new else at + 2
                size = int.from_bytes(block[where : where + 2], "little")
                body = block[at + step : at + step + size]
                at += step + size
                count += 1
                if at > len(block) or count > _MESSAGES:
                    raise Broken(f"the object at byte {address:,} has a message that does not fit in its header")
                if kind == _CONTINUED and len(body) >= 16:
                    place, length = _number(body, 0), _number(body, 8)
                    blocks.append(self.checked(place, length)[4:-4] if new else self.at(place, length))
                else:
                    yield kind, body

    def old_group(self, tree: int, heap: int, name: str, depth: int) -> None:
        """Visit the members of an old-format group, whose B-tree lists them by name."""
        head = self.at(heap, 32)
        if head[:4] != b"HEAP":
            raise Broken(f"the names of group /{short(name, 60)} are not at their address")
        names = self.at(_number(head, 24), _number(head, 8))
        for leaf in self.leaves(tree, 8, b"TREE\x00", 0):
            head = self.at(leaf, 8)
            if head[:4] != b"SNOD":
                raise Broken(f"the members of group /{short(name, 60)} are not at their address")
            rows = self.at(leaf + 8, int.from_bytes(head[6:8], "little") * 40)
            for i in range(0, len(rows), 40):
                begin = _number(rows, i)
                end = names.find(b"\0", begin)
                if end < 0:
                    raise Broken(f"a name in group /{short(name, 60)} is truncated")
                child = names[begin:end].decode("utf-8", "replace")
                if int.from_bytes(rows[i + 16 : i + 20], "little") != 2:  # 2 means a symbolic link
                    self.visit(_number(rows, i + 8), f"{name}/{child}".lstrip("/"), depth + 1)

    def leaves(self, address: int, key: int, sign: bytes, depth: int) -> Iterator[int]:
        """Yield the addresses in the leaves of a B-tree (version 1) whose keys have `key` bytes."""
        if address == _NOWHERE:
            return
        if depth > 16 or (address in self.seen):
            raise Broken("has a B-tree that is too deep or contains a cycle")
        self.seen.add(address)
        head = self.at(address, 24)
        if head[:5] != sign:
            raise Broken(f"lacks a B-tree at byte {address:,}, although another object points there")
        count = int.from_bytes(head[6:8], "little")
        body = self.at(address + 24, count * (key + 8))
        for i in range(count):
            child = _number(body, i * (key + 8) + key)
            if head[5]:
                yield from self.leaves(child, key, sign, depth + 1)
            elif sign[4] == 0:
                yield child
            else:
                self.inside(child, int.from_bytes(body[i * (key + 8) : i * (key + 8) + 4], "little"), "a chunk")

    def inside(self, start: int, length: int, what: str) -> None:
        if start + length > self.end:
            raise Broken(f"{what} needs bytes up to {start + length:,}, but the file ends at {self.end:,}")

    def dataset(self, name: str, space: bytes, kind: bytes, layout: bytes) -> None:
        """Add a dataset, and check that its data or all of its chunks are inside the file."""
        shape = _shape(space)
        size = int.from_bytes(kind[4:8], "little")
        dtype, big = _dtype(kind, size)
        extent = math.prod(shape) * size
        if extent > 1 << 62:
            raise Broken(f"dataset {short(name, 60)} has an invalid shape")
        version, form = layout[0], layout[1]
        start = -1
        if version not in (3, 4) or form > 2 or (version == 4 and form == 2):
            self.left_out += 1
        elif form == 1 and _number(layout, 2) != _NOWHERE:
            start, length = _number(layout, 2), _number(layout, 10)
            if length != extent:
                raise Broken(f"dataset {short(name, 60)} has {length:,} bytes; its shape needs {extent:,}")
            self.inside(start, length, f"dataset {short(name, 60)}")
            if big is not None:
                self.orders.add(big)
        elif form == 2:
            dims = layout[2]
            for _ in self.leaves(_number(layout, 3), 8 + 8 * dims, b"TREE\x01", 0):
                pass
        self.found.tensors.append(Tensor(name, dtype, shape, start, extent))


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _shape(space: bytes) -> tuple[int, ...]:
    """Return the dimensions of a dataspace: () for a scalar, (0,) for an empty dataspace."""
    version, rank = space[0], space[1]
    if version == 2 and space[3] == 2:
        return (0,)
    begin = 8 if version == 1 else 4
    if version not in (1, 2) or len(space) < begin + 8 * rank:
        raise Broken("has a dataset with a truncated shape")
    return tuple(_number(space, begin + 8 * i) for i in range(rank))


def _dtype(kind: bytes, size: int) -> tuple[str, bool | None]:
    """Return an element's type and byte order: true for big-endian, None if the type has no byte order."""
    form, big = kind[0] & 15, bool(kind[1] & 1) if size > 1 else None
    if form == 0:
        name = f"{'I' if kind[1] & 8 else 'U'}{size * 8}"
        return (name, big) if size in (1, 2, 4, 8) else ("integer", None)
    if form == 1 and len(kind) >= 14:
        return _FLOATS.get((size, kind[13]), "float"), big
    if form == 8:
        return ("BOOL" if size == 1 else "enum"), None
    return {3: "text", 6: "record", 7: "reference", 9: "list"}.get(form, "other"), None


def _link(body: bytes) -> tuple[str, int | None]:
    """Return a link's name and its target's address; None if the link is not a hard link."""
    flags = body[1]
    kind = body[2] if flags & 8 else 0
    at = 2 + bool(flags & 8) + 8 * bool(flags & 4) + bool(flags & 16)
    width = 1 << (flags & 3)
    length = int.from_bytes(body[at : at + width], "little")
    at += width
    name = body[at : at + length].decode("utf-8", "replace")
    return name, None if kind else _number(body, at + length)
