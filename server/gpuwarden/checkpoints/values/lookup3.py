"""Compute Bob Jenkins' lookup3, the metadata checksum in newer HDF5 files. Standard library only."""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MIX = ((0, 2, 1, 4), (1, 0, 2, 6), (2, 1, 0, 8), (0, 2, 1, 16), (1, 0, 2, 19), (2, 1, 0, 4))
_FINAL = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))


def lookup3(data: bytes) -> int:
    """Return the checksum of the data: `hashlittle` with the initial value 0."""
    words = [(0xDEADBEEF + len(data)) & _MASK] * 3
    last = max(0, (len(data) - 1) // 12 * 12)
    for at in range(0, last, 12):
        _add(words, data[at : at + 12])
        for a, b, c, turn in _MIX:
            words[a] = (words[a] - words[b]) & _MASK ^ _turned(words[b], turn)
            words[b] = (words[b] + words[c]) & _MASK
    if not data:
        return words[2]
    _add(words, data[last:].ljust(12, b"\0"))
    for a, b, turn in _FINAL:
        words[a] = ((words[a] ^ words[b]) - _turned(words[b], turn)) & _MASK
    return words[2]


def _add(words: list[int], piece: bytes) -> None:
    for i in range(3):
        words[i] = (words[i] + int.from_bytes(piece[4 * i : 4 * i + 4], "little")) & _MASK


def _turned(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _MASK
