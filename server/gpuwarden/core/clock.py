"""Clocks that are passed as parameters, so that tests do not have to wait."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol

import anyio


class Clock(Protocol):
    """The interface that all clocks implement."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for this many seconds."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait in real time."""
        await anyio.sleep(seconds)


class ShiftedClock:
    """The system clock plus a number of seconds from a file. All processes that read the file share the same time.

    With this clock, a rehearsal can simulate hours in seconds. `sleep` waits in real time, so that processes can
    run. A missing or unreadable file counts as 0 seconds.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def now(self) -> float:
        """Return the shifted time in seconds since the epoch."""
        try:
            return time.time() + float(self.file.read_text("ascii"))
        except (OSError, ValueError):
            return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait in real time."""
        await anyio.sleep(seconds)


def doubled(first_s: float, failures: int, longest_s: float) -> float:
    """Return the seconds to wait after a number of consecutive failures: 0, `first_s`, then twice as long each time.

    The exponent is limited, because a power of two above 2**1023 raises OverflowError, and a failure that lasts for
    days could reach it.
    """
    return min(first_s * 2.0 ** min(failures - 1, 64), longest_s) if failures > 0 else 0.0


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the number of seconds to wait according to the `Retry-After` header, which contains seconds or a date.

    A date is compared with the server's own `Date` header, because clocks differ, or with `now` if the reply has no
    `Date` header. Return None if `Retry-After` is missing or invalid.
    """
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text):
        return float(text)
    until, sent = _date(text), _date(headers.get("date", ""))
    return None if until is None else max(0.0, until - (now if sent is None else sent))


def _date(text: str) -> float | None:
    try:
        found = parsedate_to_datetime(text[:60])
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        return None
