"""Large streams through the system's own `ssh`, which decrypts in a separate process: twice paramiko's rate.

It accepts only the host key of the paramiko connection, never prompts, and shares nothing with the user's other
connections. Without a usable client it raises `Unusable` before the first byte, and the caller uses paramiko.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import anyio
from anyio import to_thread

from gpuwarden.core.errors import Unreachable
from gpuwarden.core.sanitize import SECRET_NAME
from gpuwarden.remote.ssh.session import MAX_NOISE, MAX_STDERR, CommandFailed, Ssh
from gpuwarden.remote.ssh.shell_quote import command_line

BULK_BYTES = 32 << 20
_PIPE = 1 << 20
_PIECE = 1 << 18
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


Take = Callable[[memoryview], object]


class Unusable(Exception):
    """The system's client can't do it here; nothing was received."""


def available() -> bool:
    """Return whether a client is installed."""
    return shutil.which("ssh") is not None


async def bulk_pour(machine: Ssh, argv: Sequence[str], take: Take, *, stdin: bytes = b"") -> None:
    """Hand the output of a command that only writes to `take`, which runs in one worker thread. Its stdin is small.

    A view that `take` was given is overwritten after its return. Raises `Unusable` before the first byte,
    `Unreachable` when the connection is lost, `CommandFailed` at the end, and what `take` raises. Leaving early closes
    the connection, on which a command that only writes ends; `take` is never called after that.
    """
    key = await machine.open()
    with tempfile.TemporaryDirectory(prefix="gpuwarden-") as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"gpuwarden {key.line}\n", encoding="ascii")
        client = _Client(machine, argv, known)
        try:
            await to_thread.run_sync(client.pour, take, stdin, abandon_on_cancel=True)
        finally:
            client.stop()
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(client.close)


class _Client:
    """One run of `ssh`. Its output goes through one buffer that stays in the processor's cache."""

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
        self.gate = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = threading.Event()
        self.ended = threading.Event()

    def pour(self, take: Take, stdin: bytes) -> None:
        """Run the whole transfer in one thread."""
        try:
            self._start(stdin)
            self._skip_noise(take)
            piece = memoryview(bytearray(_PIECE))
            while count := self._read_into(piece):
                take(piece[:count])
            if self.process is None or self.stopped.is_set():
                return
            code = self.process.wait()
            if code == _SSH_FAILED:
                lost = f"the connection to {self.machine.endpoint} was lost: {self._said()}"
                raise Unreachable(lost, "It is continued.")
            if code:
                raise CommandFailed(self.argv, code, self.err.read_bytes()[:MAX_STDERR])
        finally:
            self.ended.set()

    def _start(self, stdin: bytes) -> None:
        """Run it, unless the caller has left, and send its stdin."""
        # A `SendEnv` of the user's configuration would take the environment's secrets to the machine.
        env = {name: value for name, value in os.environ.items() if not SECRET_NAME.search(name)}
        with self.gate, self.err.open("wb") as err:
            if self.stopped.is_set():
                return
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, bufsize=0, env=env
            )
        assert self.process.stdin and self.process.stdout
        if sys.platform == "linux":
            import fcntl

            with suppress(OSError):
                fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
        with suppress(OSError):
            self.process.stdin.write(stdin)
        with suppress(OSError):
            self.process.stdin.close()

    def _read_into(self, piece: memoryview) -> int:
        """Read into the buffer; return the number of bytes, 0 at the end or once the caller has left."""
        if self.process is None or self.stopped.is_set():
            return 0
        count = cast("io.RawIOBase", self.process.stdout).readinto(piece) or 0
        return 0 if self.stopped.is_set() else count

    def _skip_noise(self, take: Take) -> None:
        """Read up to the mark's line, and take what follows it."""
        noise, token, piece = b"", f"\n{self.mark} ".encode(), memoryview(bytearray(_PIECE))
        while len(noise) < MAX_NOISE and (count := self._read_into(piece)):
            noise += piece[:count]
            found, _, rest = noise.partition(token)
            if len(found) < len(noise) and b"\n" in rest:
                if first := rest.partition(b"\n")[2]:
                    take(memoryview(first))
                return
        raise Unusable(self._said() or "it did not start the command")

    def _said(self) -> str:
        with suppress(OSError):
            return self.err.read_text(encoding="utf-8", errors="replace").strip()[-300:]
        return ""

    def stop(self) -> None:
        """End the client, whatever it does; the thread that reads from it sees an end."""
        with self.gate:
            self.stopped.set()
        if self.process is None:
            self.ended.set()
        else:
            self.process.kill()

    def close(self) -> None:
        """Wait for both to have ended."""
        self.ended.wait()
        if self.process is not None:
            self.process.wait()
            assert self.process.stdout
            self.process.stdout.close()
