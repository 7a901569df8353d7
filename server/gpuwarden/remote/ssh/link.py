"""Manage the connection to one machine. It is opened on first use, reused, and reopened if lost. All calls block."""

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
# By default, sshd allows ten sessions per connection, including sessions that have just ended.
SESSIONS: Final = 5


class Link:
    """The connection to one machine, with slots for commands. It is thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        pin: str | None,
        config: Path | None,
        dial: Callable[[str | None], Connection] | None = None,
    ) -> None:
        self.endpoint, self.pin, self.config = endpoint, pin, config
        self.dial = dial
        """A function that takes the pinned key and connects by means other than SSH; None to connect over SSH."""
        self.opened: Connection | None = None
        self.slots = threading.BoundedSemaphore(SESSIONS)
        self._opening = threading.Lock()
        """Held during a login, so that logins do not overlap."""
        self._state = threading.RLock()
        """Protects the fields `opened` and `pin`. Never held during a login, which may take a minute."""
        self._generation = 0

    def connection(self) -> Connection:
        """Return the connection, opening it first if necessary. Blocks."""
        with self._opening:
            with self._state:
                if self.opened is not None and self.opened.alive:
                    return self.opened
                dead, self.opened = self.opened, None
                pin, generation = self.pin, self._generation
            if dead is not None:
                dead.close()
            opened = self.dial(pin) if self.dial else connect(self.endpoint, pin=pin, config=self.config)
            with self._state:
                if generation == self._generation:
                    self.opened, self.pin = opened, opened.key.line
                    return opened
        # The link was closed or its pin was changed during this login.
        opened.close()
        raise Unreachable(f"the connection to {self.endpoint} was closed during the login", "Try again.")

    def channel(self, command: bytes, wanted: Callable[[], bool]) -> Channel | None:
        """Start a command and return its channel; None if `wanted` returns False.

        A dead connection is reopened once, which is safe because the command has not been started yet. If the machine
        refuses a session, the session is requested again for up to `OPEN_S` seconds, because sessions that have just
        ended may still count toward the limit.
        """
        end, reopened, wait = time.monotonic() + OPEN_S, False, 0.02
        while True:
            opened = self.connection()
            try:
                return opened.open_channel(command) if wanted() else None
            except OSError as problem:
                alive = opened.alive
                if time.monotonic() + wait > end or (reopened and not alive):
                    raise Unreachable(f"{self.endpoint} refused a session: {problem}", "Try again.") from problem
                reopened = reopened or not alive
                time.sleep(wait)
                wait = min(2 * wait, 1.0)

    def repin(self, pin: str) -> None:
        """Accept only this host key from now on, even for a login in progress."""
        with self._state:
            if pin != self.pin:
                self.pin = pin
                self.close()

    def close(self) -> None:
        """Close the connection. A login in progress is closed when it completes. The next call opens a new one."""
        with self._state:
            self._generation += 1
            opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()
