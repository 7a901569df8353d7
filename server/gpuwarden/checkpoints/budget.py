"""Limit the time, bytes and folder entries of one examination. Standard library only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuwarden.checkpoints.file_model import Doubtful
from gpuwarden.core.evidence import Cause


@dataclass
class Budget:
    """Seconds, bytes and entries of folders; time is counted from its creation. Threads may share one."""

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
        """Return a description of what ran out; "" while some of everything is left."""
        if self.now() >= self._end:
            return f"the time for one look, {self.seconds:,.0f} s, is over"
        if self._read >= self.bytes:
            return f"the bytes for one look, {self.bytes:,}, are read"
        return ""

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._end - self.now())

    def take(self, count: int) -> None:
        """Count bytes that were read. Raises Doubtful when nothing is left."""
        with self._lock:
            self._read += count
        if self.spent:
            raise Doubtful(f"was not read to its end: {self.spent}", Cause.LIMIT)
