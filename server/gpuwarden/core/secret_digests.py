"""Find secrets that are known only by a keyed digest.

A process that never had a secret's value must still keep the secret out of its output. Digests are grouped by the
length of their value. For each length, a rolling hash moves over the words of a text. A few stored bits of each
secret's hash select the windows for which a full digest is computed. For each length, the running time is linear in the
length of the text.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MIN_LENGTH: Final = 6
"""Minimum length of a secret in characters. Removing shorter values would also remove ordinary words."""
_PRIME: Final = (1 << 61) - 1
_KEPT: Final = (1 << 16) - 1
"""Stored bits of a rolling hash: enough to skip nearly all windows, but too few to reveal much of the value."""
_WORD: Final = re.compile(r"\S+")


@dataclass(frozen=True)
class SecretDigest:
    """One secret. `spaced`: the value contains white space, so the search spans words."""

    length: int
    spaced: bool
    bits: int
    digest: str

    @classmethod
    def of(cls, key: bytes, value: str) -> SecretDigest:
        """Return the keyed digest of a value."""
        bits = _hash(value, _base(key)) & _KEPT
        return cls(len(value), any(c.isspace() for c in value), bits, _digest(key, value))


def parts_of(value: str) -> Iterator[str]:
    """Yield the parts of a secret that must not be shown: the value, its stripped form, and each of its lines."""
    lines = value.splitlines()
    for part in {value, value.strip(), *(lines if len(lines) > 1 else ())}:
        if len(part) >= MIN_LENGTH:
            yield part


def found_in(text: str, key: bytes, known: Iterable[SecretDigest]) -> set[str]:
    """Return the parts of a text that are known secrets."""
    sorts: dict[tuple[int, bool], dict[int, set[str]]] = {}
    for one in known:
        sorts.setdefault((one.length, one.spaced), {}).setdefault(one.bits, set()).add(one.digest)
    base, found = _base(key), set()
    for (length, spaced), digests in sorts.items():
        for piece in [text] if spaced else _WORD.findall(text):
            for window in _windows(piece, length, base, digests):
                if _digest(key, window) in digests[_hash(window, base) & _KEPT]:
                    found.add(window)
    return found


def _windows(piece: str, length: int, base: int, wanted: Mapping[int, object]) -> Iterator[str]:
    """Yield the windows of a text whose rolling hash has one of the `wanted` bit patterns."""
    if len(piece) < length:
        return
    codes = list(map(ord, piece))
    top, seen = pow(base, length, _PRIME), _hash(piece[:length], base)
    for at in range(length, len(codes) + 1):
        if seen & _KEPT in wanted:
            yield piece[at - length : at]
        if at < len(codes):
            seen = (seen * base + codes[at] - codes[at - length] * top) % _PRIME


def _hash(text: str, base: int) -> int:
    value = 0
    for code in map(ord, text):
        value = (value * base + code) % _PRIME
    return value


def _base(key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"rolling" + key).digest()[:7], "big") + 0x110000


def _digest(key: bytes, value: str) -> str:
    return hmac.new(key, value.encode("utf-8", "surrogatepass"), "sha256").hexdigest()


def texts_of(body: Any) -> Iterator[str]:
    """Yield every string in a JSON body, including field names."""
    if isinstance(body, str):
        yield body
    elif isinstance(body, Mapping):
        for name, value in body.items():
            yield str(name)
            yield from texts_of(value)
    elif isinstance(body, list | tuple):
        for item in body:
            yield from texts_of(item)
