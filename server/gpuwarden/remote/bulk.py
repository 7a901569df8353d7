"""Large streams through the system's own `ssh`, which decrypts in a process of its own: twice paramiko's rate.

It is held to the key that our own connection was held to, never asks anything, and shares nothing with the user's
other connections. Where there is no usable client, `Unusable` says so before the first byte, and the caller takes
paramiko's way.
"""

from __future__ import annotations

import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

from anyio import to_thread

from gpuwarden.core.errors import Unreachable
from gpuwarden.remote.quote import command_line
from gpuwarden.remote.ssh import MAX_NOISE, MAX_STDERR, CommandFailed, Ssh

BULK_BYTES = 32 << 20
_CHUNK = 1 << 20
_AHEAD = 8
_SSH_FAILED = 255
_OPTIONS = {
    "BatchMode": "yes",
    "StrictHostKeyChecking": "yes",
    "GlobalKnownHostsFile": "/dev/null",
    "HostKeyAlias": "gpuwarden",
    "UpdateHostKeys": "no",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "RequestTTY": "no",
    "PermitLocalCommand": "no",
    "Compression": "no",
    "Ciphers": "^aes128-gcm@openssh.com",
    "LogLevel": "ERROR",
    "ConnectTimeout": "15",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
}


class Unusable(Exception):
    """The system's client can't do it here; nothing was received."""


def available() -> bool:
    """Whether there is a client to try."""
    return shutil.which("ssh") is not None


async def bulk_stream(machine: Ssh, argv: Sequence[str], *, stdin: bytes = b"") -> AsyncGenerator[bytes, None]:
    """The output of a command that only writes, as `Ssh.stream` gives it. Its stdin is small.

    Raises `Unusable` before the first byte, `Unreachable` when the line is lost, `CommandFailed` at the end.
    Leaving early closes the line, on which a command that only writes ends.
    """
    key = await machine.open()
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"gpuwarden {key.line}\n", encoding="ascii")
        client = _Client(machine, argv, known)
        try:
            await to_thread.run_sync(client.start, stdin)
            while chunk := await to_thread.run_sync(client.read, abandon_on_cancel=True):
                yield chunk
            await to_thread.run_sync(client.finish, abandon_on_cancel=True)
        finally:
            client.close()


class _Client:
    """One run of `ssh`, read ahead by a thread so that hashing and writing don't hold up the line."""

    def __init__(self, machine: Ssh, argv: Sequence[str], known_hosts: Path) -> None:
        self.machine, self.argv = machine, argv
        self.mark = secrets.token_hex(12)
        end = machine.endpoint
        chosen = {"UserKnownHostsFile": str(known_hosts), **_OPTIONS}
        options = [word for name, value in chosen.items() for word in ("-o", f"{name}={value}")]
        config = ["-F", str(machine.config)] if machine.config else []
        line = os.fsdecode(command_line(argv, self.mark))
        self.command = ["ssh", *config, *options, "-p", str(end.port), "-l", end.user, "--", end.alias, line]
        self.err = known_hosts.with_name("stderr")
        self.process: subprocess.Popen[bytes] | None = None
        self.ahead: queue.Queue[bytes] = queue.Queue(_AHEAD)
        self.started = self.stopped = False

    def start(self, stdin: bytes) -> None:
        """Run it and send its stdin."""
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, bufsize=0
            )
        assert self.process.stdin and self.process.stdout
        if sys.platform == "linux":
            import fcntl

            with suppress(OSError):
                fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, _CHUNK)
        with suppress(OSError):
            self.process.stdin.write(stdin)
            self.process.stdin.close()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        """Hand on what came when somebody waits, else large pieces: each piece costs two changes of thread."""
        assert self.process and self.process.stdout
        held = bytearray()
        with suppress(OSError, ValueError):
            while data := os.read(self.process.stdout.fileno(), _CHUNK):
                held += data
                if len(held) >= _CHUNK or self.ahead.empty():
                    self._offer(bytes(held))
                    held.clear()
        if held:
            self._offer(bytes(held))
        self._offer(b"")

    def _offer(self, data: bytes) -> None:
        while not self.stopped:
            try:
                self.ahead.put(data, timeout=0.2)
                return
            except queue.Full:
                continue

    def read(self) -> bytes:
        """The next piece after the mark; empty at the end."""
        if self.started:
            return self._next()
        noise, token = b"", f"\n{self.mark} ".encode()
        while chunk := self._next():
            noise += chunk
            found, _, rest = noise.partition(token)
            if len(found) < len(noise) and b"\n" in rest:
                self.started = True
                return rest.partition(b"\n")[2] or self._next()
            if len(found) > MAX_NOISE:
                break
        raise Unusable(self._said() or "it did not start the command")

    def _next(self) -> bytes:
        while not self.stopped:
            try:
                return self.ahead.get(timeout=0.2)
            except queue.Empty:
                continue
        return b""

    def finish(self) -> None:
        """Raise unless it ended well."""
        assert self.process
        code = self.process.wait()
        if code == _SSH_FAILED:
            raise Unreachable(f"the connection to {self.machine.endpoint} was lost: {self._said()}", "It is continued.")
        if code:
            raise CommandFailed(self.argv, code, self.err.read_bytes()[:MAX_STDERR])

    def _said(self) -> str:
        with suppress(OSError):
            return self.err.read_text(encoding="utf-8", errors="replace").strip()[-300:]
        return ""

    def close(self) -> None:
        """End the client, whatever it does."""
        self.stopped = True
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        assert self.process.stdin and self.process.stdout
        with suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
