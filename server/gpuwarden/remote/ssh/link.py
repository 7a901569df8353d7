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

    def __init__(
        self,
        endpoint: Endpoint,
        pin: str | None,
        config: Path | None,
        dial: Callable[[str | None], Connection] | None = None,
    ) -> None:
        self.endpoint, self.pin, self.config = endpoint, pin, config
        self.dial = dial
        """Opens a connection that is not SSH's, to what has the pin's key; None for SSH."""
        self.opened: Connection | None = None
        self.slots = threading.BoundedSemaphore(SESSIONS)
        self._opening = threading.Lock()
        """Held during a login, of which there is one at a time."""
        self._state = threading.RLock()
        """Guards what follows, and `opened` and `pin`; never held during a login, which may take a minute."""
        self._generation = 0
        self._early: object = None
        self._failed: Exception | None = None

    def begin(self) -> None:
        """Start to connect in another thread, for a caller who has something to do meanwhile.

        The next call of `connection` waits for that and raises its error. A caller who makes no such call calls
        `forget`.
        """
        if not self._opening.acquire(blocking=False):
            return
        attempt = self._early = object()

        def early() -> None:
            try:
                self._connect()
            except Exception as error:
                with self._state:
                    if self._early is attempt:
                        self._failed = error
            finally:
                self._opening.release()

        try:
            threading.Thread(target=early, daemon=True).start()
        except RuntimeError:  # no thread can be started now, so `connection` logs in
            self._opening.release()

    def forget(self) -> None:
        """Drop the error of an early login, past or future: nobody waits for it any more."""
        with self._state:
            self._early = self._failed = None

    def connection(self) -> Connection:
        """Return the connection, opened unless it is. Blocking."""
        with self._opening:
            with self._state:
                failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            return self._connect()

    def _connect(self) -> Connection:
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
        # The owner closed the connection, or requires another key, since this login began.
        opened.close()
        raise Unreachable(f"the connection to {self.endpoint} was closed during its login", "Try again.")

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

    def repin(self, pin: str) -> None:
        """Accept only this key from now on, whatever a login that is under way finds."""
        with self._state:
            if pin != self.pin:
                self.pin = pin
                self.close()

    def close(self) -> None:
        """Close the connection, and that of a login under way once it has ended; the next call opens a new one."""
        with self._state:
            self._generation += 1
            self.forget()
            opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()
