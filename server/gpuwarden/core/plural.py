"""Format a count with its noun."""

from __future__ import annotations


def counted(number: int, thing: str, many: str = "") -> str:
    """Return `1 file`, `3 files` or `no file`; `many` is an irregular plural."""
    if number == 0:
        return f"no {thing}"
    return f"1 {thing}" if number == 1 else f"{number:,} {many or thing + 's'}"
