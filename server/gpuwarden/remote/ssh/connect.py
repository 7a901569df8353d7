"""Connect to a machine with the system's `ssh` if it is usable, otherwise with paramiko. All calls block."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpuwarden.remote.ssh import openssh
from gpuwarden.remote.ssh.config import Endpoint
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.ssh.mux import TICK_S


class Channel(Protocol):
    """One command on a machine. Use it from one thread at a time; `close` may be called at any time.

    Methods wait at most `TICK_S` seconds before raising `TimeoutError`. They raise `OSError` if the connection is lost.
    """

    def send(self, data: memoryview) -> int:
        """Send to stdin; return the number of bytes accepted. Raises `BrokenPipeError` if the command closed stdin."""
        ...

    def end_input(self) -> None:
        """Close stdin."""
        ...

    def receive_into(self, buffer: memoryview, wait_s: float = TICK_S) -> int:
        """Read from stdout; return 0 at its end. Raises `ConnectionError` if the connection ended before that."""
        ...

    def errors(self) -> bytes:
        """Return stderr output received since the last call, without waiting."""
        ...

    def exited(self) -> bool:
        """Return whether the command is known to have ended."""
        ...

    def code(self) -> int | None:
        """Return the exit code; None if a signal ended the command.

        Raises `ConnectionError` if the connection is lost.
        """
        ...

    def close(self) -> None:
        """Close the channel. The command is not killed."""
        ...


class Connection(Protocol):
    """An authenticated connection that can run many commands."""

    @property
    def key(self) -> HostKey:
        """Return the verified host key."""
        ...

    @property
    def alive(self) -> bool:
        """Return whether the connection can run commands."""
        ...

    def open_channel(self, command: bytes) -> Channel:
        """Start a command line. Raises `OSError` if the machine currently refuses another session."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def connect(endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None) -> Connection:
    """Connect and log in.

    Raises `HostKeyChanged`, `AuthFailed`, `BadReply` if the server is not an SSH server, and otherwise `Unreachable`.
    """
    if client := openssh.usable():
        return openssh.connect(client, endpoint, pin=pin, config=config)
    from gpuwarden.remote.ssh import paramiko_client

    return paramiko_client.connect(endpoint, pin=pin, config=config)
