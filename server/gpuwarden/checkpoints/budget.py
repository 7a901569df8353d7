"""Limit the time, bytes and folder entries of one examination. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuwarden.checkpoints.file_model import Doubtful
from gpuwarden.core.evidence import Cause


class ByteCount:
    """The number of bytes read so far, and the total. Several threads may update it."""

    def __init__(self, report: Callable[[int, int | None], None]) -> None:
        self._report = report
        self._done = 0
        self._total: int | None = None
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        """Count bytes that have been read. Bytes read twice are counted twice, so the reported total may grow."""
        with self._lock:
            self._done += count
            total = None if self._total is None else max(self._total, self._done)
            self._report(self._done, total)

    def expect(self, size: int) -> None:
        """Add `size` to the total number of bytes to read."""
        with self._lock:
            self._total = (self._total or 0) + size
            self._report(self._done, self._total)


@dataclass
class Budget:
    """Limits on bytes read, folder entries, and the time since the budget was created. Threads may share a budget."""

    seconds: float
    bytes: int
    entries: int = 1 << 60
    now: Callable[[], float] = time.monotonic
    _end: float = field(init=False)
    _read: int = field(init=False, default=0)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._end = self.now() + self.seconds

    @property
    def spent(self) -> str:
        """Describe the limit that has been reached; "" if none has."""
        if self.now() >= self._end:
            return f"the time limit of {self.seconds:,.0f} s was reached"
        if self._read >= self.bytes:
            return f"the limit of {self.bytes:,} bytes was reached"
        return ""

    @property
    def left_s(self) -> float:
        """Return the remaining seconds."""
        return max(0.0, self._end - self.now())

    def take(self, count: int) -> None:
        """Count bytes that have been read. Raises Doubtful if a limit has been reached."""
        with self._lock:
            self._read += count
        if self.spent:
            raise Doubtful(f"was not read completely: {self.spent}", Cause.LIMIT)
