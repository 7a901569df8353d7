"""Compute CRC-32C (Castagnoli), which the standard library lacks. This implementation is too slow for weights."""

from __future__ import annotations

_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [n >> 1 ^ 0x82F63B78 if n & 1 else n >> 1 for n in _TABLE]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of the data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Return the checksum in the masked form that TensorFlow's record files store."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
