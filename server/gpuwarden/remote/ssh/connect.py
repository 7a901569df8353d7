"""Open a connection to a machine: by the system's own `ssh` where it can be used, else by paramiko. Blocking."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpuwarden.remote.ssh import openssh
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.ssh.mux import TICK_S


class Channel(Protocol):
    """One command on a machine. Its methods wait at most `TICK_S` and raise `TimeoutError` then; a lost connection is
    an `OSError`. One thread at a time; `close` is safe at any moment.
    """

    def send(self, data: memoryview) -> int:
        """Send to stdin what it takes now. Raises `BrokenPipeError` when the command takes no more."""
        ...

    def end_input(self) -> None:
        """Close stdin."""
        ...

    def receive_into(self, buffer: memoryview, wait_s: float = TICK_S) -> int:
        """Read what stdout has; 0 at its end. Raises `ConnectionError` where the end is that of the connection."""
        ...

    def errors(self) -> bytes:
        """Return what stderr had since the last call; never waits."""
        ...

    def exited(self) -> bool:
        """Return whether the command's end is known."""
        ...

    def code(self) -> int | None:
        """Return the exit code; None where a signal ended the command. Raises `ConnectionError` for a lost one."""
        ...

    def close(self) -> None:
        """Leave the command."""
        ...


class Connection(Protocol):
    """A logged-in connection, for many commands."""

    @property
    def key(self) -> HostKey:
        """Return the key that the host proved to have."""
        ...

    @property
    def alive(self) -> bool:
        """Return whether commands can be sent."""
        ...

    def open_channel(self, command: bytes) -> Channel:
        """Start a command line. Raises `OSError` where the machine opens no further session now."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


def connect(endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None) -> Connection:
    """Connect and log in.

    Raises `HostKeyChanged`, `AuthFailed`, `BadReply` when something else than SSH answers, else `Unreachable`.
    """
    if client := openssh.usable():
        return openssh.connect(client, endpoint, pin=pin, config=config)
    from gpuwarden.remote.ssh import paramiko_client

    return paramiko_client.connect(endpoint, pin=pin, config=config)
