"""The connection to one machine: opened when it is first needed, reused, and opened again when it died. Blocking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import Unreachable
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.connect import Channel, Connection, connect

OPEN_S: Final = 15.0
# sshd allows ten sessions on one connection by default, and counts those that just ended for a moment longer.
SESSIONS: Final = 5


class Link:
    """One machine's connection, and the slots for commands on it. Safe to use from many threads."""

    def __init__(self, endpoint: Endpoint, pin: str | None, config: Path | None) -> None:
        self.endpoint, self.pin, self.config = endpoint, pin, config
        self.opened: Connection | None = None
        self.slots = threading.BoundedSemaphore(SESSIONS)
        self._opening = threading.Lock()
        self._failed: Exception | None = None

    def begin(self) -> None:
        """Start to connect in another thread, for a caller who has something to do meanwhile.

        The next call of `connection` waits for that and raises its error.
        """

        def early() -> None:
            try:
                self._connect()
            except Exception as error:
                self._failed = error
            finally:
                self._opening.release()

        if self._opening.acquire(blocking=False):
            threading.Thread(target=early, daemon=True).start()

    def connection(self) -> Connection:
        """Return the connection, opened unless it is. Blocking."""
        with self._opening:
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            return self._connect()

    def _connect(self) -> Connection:
        if self.opened is not None and self.opened.alive:
            return self.opened
        if self.opened is not None:
            self.opened.close()
            self.opened = None
        self.opened = connect(self.endpoint, pin=self.pin, config=self.config)
        self.pin = self.opened.key.line
        return self.opened

    def channel(self, command: bytes, wanted: Callable[[], bool]) -> Channel | None:
        """Return the channel of a command, None once it is not wanted any more.

        Nothing has run yet, so a dead connection is opened again, once. A session that just ended still counts on the
        far side for a moment, so a refused one is asked for again.
        """
        end, reopened, wait = time.monotonic() + OPEN_S, False, 0.02
        while True:
            opened = self.connection()
            try:
                return opened.open_channel(command) if wanted() else None
            except OSError as problem:
                alive = opened.alive
                if time.monotonic() + wait > end or (reopened and not alive):
                    raise Unreachable(f"{self.endpoint} opens no session: {problem}", "Try again.") from problem
                reopened = reopened or not alive
                time.sleep(wait)
                wait = min(2 * wait, 1.0)

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()
