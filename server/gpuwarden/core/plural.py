"""How many there are of a thing, as people write it."""

from __future__ import annotations


def counted(number: int, thing: str, many: str = "") -> str:
    """`1 file`, `3 files`, `no file`; with `many` where an s is not enough."""
    if number == 0:
        return f"no {thing}"
    return f"1 {thing}" if number == 1 else f"{number:,} {many or thing + 's'}"
