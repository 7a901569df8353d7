"""Simulate PyTorch's CUDA caching allocator to find how much memory it reserves for a sequence of tensors.

The allocator reserves segments of the GPU's memory, splits them into blocks, and keeps freed blocks for later tensors.
Some free blocks are too small for any tensor, so a run reserves more memory than its tensors occupy. The simulation
follows c10/cuda/CUDACachingAllocator.cpp with default settings, on one stream.
"""

from __future__ import annotations

import bisect
from typing import Final

MIB: Final = 1 << 20
_SMALLEST: Final = 512
_SMALL: Final = MIB
"""Tensors up to this size are allocated in 2 MiB segments, larger tensors in segments of at least 20 MiB."""
_SMALL_SEGMENT: Final = 2 * MIB
_LARGE_SEGMENT: Final = 20 * MIB
_ALONE: Final = 10 * MIB
"""A tensor of at least this size is allocated in a segment of its size, rounded up to a multiple of 2 MiB."""


class CardFull(Exception):
    """The GPU has no room for another segment, even after all unused segments have been freed."""


class Block:
    """A part of a segment; it contains one tensor or is free."""

    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool, before: Block | None = None) -> None:
        self.address, self.size, self.small, self.free = address, size, small, True
        self.before: Block | None = before
        self.after: Block | None = None


class CachingAllocator:
    """A simulated allocator that counts the bytes in tensors (`allocated`) and in segments (`reserved`), with peaks."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit = limit
        self.allocated = self.most_allocated = 0
        self.reserved = self.most_reserved = 0
        self.emptied = 0
        """The number of times that unused segments were freed because the GPU was full."""
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._segments = 0

    def take(self, size: int) -> Block:
        """Return a block of `size` bytes: the smallest free block that fits, or a part of a new segment.

        Raises CardFull.
        """
        size = max(1, -(-size // _SMALLEST)) * _SMALLEST
        small = size <= _SMALL
        free = self._free[small]
        at = bisect.bisect_left(free, (size,))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= _SMALLEST if small else rest > _SMALL:
            block.size = size
            other = Block(block.address + size, rest, small, block)
            other.after, block.after = block.after, other
            if other.after:
                other.after.before = other
            self._keep(other)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Free a block and merge it with adjacent free blocks."""
        self.allocated -= block.size
        if block.after and block.after.free:
            self._join(block, block.after, gone=block.after)
        if block.before and block.before.free:
            block = self._join(block.before, block, gone=block.before)
        self._keep(block)

    def _join(self, first: Block, second: Block, gone: Block) -> Block:
        """Merge two adjacent blocks and return the result; `gone` is the free block."""
        free = self._free[gone.small]
        free.pop(bisect.bisect_left(free, (gone.size, gone.address)))
        first.size += second.size
        first.after = second.after
        if first.after:
            first.after.before = first
        return first

    def _segment(self, size: int, small: bool) -> Block:
        """Reserve a segment on the GPU; if the GPU is full, free the unused segments first."""
        if small:
            wanted = _SMALL_SEGMENT
        else:
            wanted = _LARGE_SEGMENT if size < _ALONE else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self.reserved + wanted > self.limit:
            self.emptied += 1
            for kind, entries in self._free.items():
                unused = [entry for entry in entries if not (entry[2].before or entry[2].after)]
                self.reserved -= sum(entry[0] for entry in unused)
                self._free[kind] = [entry for entry in entries if entry[2].before or entry[2].after]
        if self.reserved + wanted > self.limit:
            raise CardFull
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._segments += 1
        return Block(self._segments << 48, wanted, small)

    def _keep(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.address, block))
