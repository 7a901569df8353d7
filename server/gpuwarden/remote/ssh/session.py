"""Run one command on one channel: start it, send its input, read its output, and kill it. All calls block.

A login shell's rc file may print text before the command does. A random mark separates the two outputs, and everything
before the mark is discarded. Closing a channel does not stop the remote process, so the process group of an abandoned
command is killed over a second channel.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.remote.ssh.connect import Channel
from gpuwarden.remote.ssh.link import OPEN_S, SESSIONS, Link
from gpuwarden.remote.ssh.mux import TICK_S
from gpuwarden.remote.ssh.outcomes import CommandFailed, CommandResult, NoShell
from gpuwarden.remote.ssh.shell_quote import command_line

KILL_S = 8.0
MAX_STDERR = 64 << 10
MAX_NOISE = 256 << 10
READ_BYTES = 1 << 20
PIECE_BYTES = 1 << 18
SFTP_S = 3.0
_SFTP_INIT = b"\0\0\0\x05\x01\0\0\0\x03"
_SFTP_VERSION = 2

# Send TERM to the group, then KILL after two seconds. If the shell does not lead a process group, signal only the
# shell.
_END = """
kill -s TERM -- "-$1" 2>/dev/null || { kill -s TERM "$1" 2>/dev/null; sleep 1; kill -s KILL "$1" 2>/dev/null; exit 0; }
i=0
while [ "$i" -lt 20 ] && kill -s 0 -- "-$1" 2>/dev/null; do sleep 0.1; i=$((i + 1)); done
kill -s KILL -- "-$1" 2>/dev/null
exit 0
""".strip()

Take = Callable[[memoryview], object]


class Session:
    """One command on one channel. The methods block: run them in worker threads, one at a time except for `kill`."""

    def __init__(self, link: Link, argv: Sequence[str]) -> None:
        self.link, self.argv = link, argv
        self.mark = secrets.token_hex(12)
        self.line = command_line(argv, self.mark)
        self.channel: Channel | None = None
        self.pid: int | None = None
        self.err = bytearray()
        self._buffer = bytearray()
        self._piece: memoryview | None = None
        self._gate = threading.Lock()
        self._holds = self._begun = self._over = self._closed = False

    # -------------------------------------------------------------------------------------------------- the phases

    def start(self, stdin: bytes | None) -> None:
        """Start the command and wait for its pid. If `stdin` is None, stdin stays open for `send`."""
        if not self.link.slots.acquire(timeout=OPEN_S):
            raise Unreachable(f"{self.link.endpoint} is already running {SESSIONS} commands", "Try again.")
        with self._gate:
            self._begun, left = not self._closed, self._closed
        channel = None
        try:
            channel = None if left else self.link.channel(self.line, lambda: not self._closed)
        finally:
            with self._gate:
                self.channel, self._holds = channel, not self._closed and channel is not None
                self._over = channel is None
                if not self._holds:
                    self.link.slots.release()
        if not self._holds:
            if channel is not None:
                channel.close()
            raise Unreachable("the command was canceled before it started")
        if stdin is not None:
            self.send(stdin)
            self.end_input()
        self._skip_noise()

    def running(self) -> bool:
        """Return whether the command may be running on the machine. If it has not started, prevent it from starting."""
        with self._gate:
            self._closed = self._closed or not self._begun
            return self._begun and not self._over

    def exchange(self, stdin: bytes, limit: int) -> CommandResult:
        """Run a command to completion and return its output."""
        self.start(stdin)
        return self.drain(limit, shut=False)

    def pour(self, take: Take, stdin: bytes) -> None:
        """Pass all output to `take`, through one buffer that fits in the CPU cache."""
        self.start(stdin)
        piece = memoryview(bytearray(PIECE_BYTES))
        while count := self.read_into(piece):
            take(piece[:count])
        self.finish()

    def drain(self, limit: int, *, shut: bool = True) -> CommandResult:
        """Close stdin, read to the end and return the result. Raises `BadReply` for more than `limit` bytes."""
        if shut:
            self.end_input()
        out = bytearray()
        while chunk := self.read():
            out += chunk
            if len(out) > limit:
                raise BadReply(f"{self.argv[0]} on {self.link.endpoint} printed more than {limit:,} bytes")
        return CommandResult(self._code(), bytes(out), bytes(self.err))

    def finish(self) -> None:
        """Wait for the exit code. Raises `CommandFailed` unless it is 0."""
        code = self._code()
        if code != 0:
            raise CommandFailed(self.argv, code, bytes(self.err))

    def send(self, data: bytes | bytearray | memoryview, stall_s: float | None = None) -> bool:
        """Send to stdin; return False if the command closed stdin.

        Raises `Unreachable` after `stall_s` seconds without progress.
        """
        view, since = memoryview(data), time.monotonic()
        with self._translated() as channel:
            while view and not self._closed:
                try:
                    view = view[channel.send(view) :]
                    since = time.monotonic()
                except TimeoutError:
                    self._drain_stderr(channel)
                    if stall_s is not None and time.monotonic() - since > stall_s:
                        raise ConnectionError(f"no data was accepted for {stall_s:g} s") from None
                except BrokenPipeError:
                    return False
        return not self._closed

    def read(self) -> bytes:
        """Return the next piece of stdout after the mark; empty at the end."""
        return self._recv()

    # ------------------------------------------------------------------------------------------------------ pieces

    def end_input(self) -> None:
        """Close stdin. Errors are reported when the output is read."""
        with suppress(Unreachable), self._translated() as channel:
            channel.end_input()

    def _skip_noise(self) -> None:
        """Discard output up to the mark and read the pid after it. Raises `NoShell` if the mark is missing."""
        token = f"\n{self.mark} ".encode()
        while self.pid is None:
            chunk = self._recv()
            self._buffer += chunk
            at = self._buffer.find(token)
            end = self._buffer.find(b"\n", at + len(token)) if at >= 0 else -1
            if end >= 0:
                output = bytes(self._buffer[at + len(token) : end])
                if not re.fullmatch(rb"[1-9][0-9]{0,9}", output):
                    named = f"{self.link.endpoint} returned {output[:40]!r} as a process id"
                    raise BadReply(named, "Check that the account's login shell is a POSIX shell.")
                self.pid = int(output)
                del self._buffer[: end + 1]
            elif not chunk or len(self._buffer) > MAX_NOISE:
                self._over = not chunk
                if not chunk:
                    self._code()  # this also reads all of stderr
                shown = (bytes(self._buffer) + bytes(self.err)).decode("utf-8", "replace").strip()[:300]
                raise NoShell(self.link.endpoint, shown, only_files=not chunk and self._speaks_sftp())

    def _speaks_sftp(self) -> bool:
        """Return whether the machine starts an SFTP server for every command, as with `ForceCommand internal-sftp`."""
        opened, answer = self.link.opened, memoryview(bytearray(64))
        try:
            channel = opened.open_channel(command_line(["true"], self.mark)) if opened else None
        except OSError:
            return False
        if channel is None:
            return False
        try:
            channel.send(memoryview(_SFTP_INIT))
            return channel.receive_into(answer, wait_s=SFTP_S) >= 5 and answer[4] == _SFTP_VERSION
        except OSError:
            return False
        finally:
            channel.close()

    def _recv(self) -> bytes:
        """Return the next piece of stdout; empty at its end. Also collect stderr."""
        if self._piece is None:
            self._piece = memoryview(bytearray(READ_BYTES))
        return bytes(self._piece[: self.read_into(self._piece)])

    def read_into(self, piece: memoryview, wait_s: float | None = None) -> int:
        """Read from stdout; return 0 at its end. Raises `TimeoutError` after `wait_s` seconds without data."""
        if self._buffer and self.pid is not None:
            count = min(len(piece), len(self._buffer))
            piece[:count] = self._buffer[:count]
            del self._buffer[:count]
            return count
        with self._translated() as channel:
            while not self._closed:
                self._drain_stderr(channel)
                try:
                    return channel.receive_into(piece, TICK_S if wait_s is None else wait_s)
                except TimeoutError:
                    if wait_s is not None:
                        raise
        return 0

    def _drain_stderr(self, channel: Channel) -> None:
        self.err += channel.errors()[: MAX_STDERR - len(self.err)]

    def _code(self) -> int | None:
        """Return the exit code; None for a signal. Raises `Unreachable` if the connection is lost before it arrives."""
        end = time.monotonic() + OPEN_S
        with self._translated() as channel:
            while True:
                try:
                    code = channel.code()
                    break
                except TimeoutError:
                    if self._closed or time.monotonic() > end:
                        raise ConnectionError("the connection ended before the command did") from None
            self._over = True
            self._drain_stderr(channel)
        return code

    @contextmanager
    def _translated(self) -> Iterator[Channel]:
        """Convert errors that indicate a lost connection to `Unreachable`."""
        try:
            if self.channel is None:
                raise ConnectionError("the command has not started")
            yield self.channel
        except TimeoutError:
            raise
        except OSError as lost:
            raise Unreachable(
                f"the connection to {self.link.endpoint} was lost: {str(lost) or 'no reason given'}",
                "The command may have taken effect. Check before trying again.",
            ) from lost

    # --------------------------------------------------------------------------------------------------------- end

    def kill(self) -> None:
        """Kill the remote command's process group. Do nothing if the command has ended: its pid may be reused."""
        end = time.monotonic() + KILL_S / 2
        channel, opened = self.channel, self.link.opened
        while self.pid is None and time.monotonic() < end and opened and opened.alive:
            time.sleep(0.02)  # another thread is reading the pid
        if self.pid is None or channel is None or channel.exited() or not (opened and opened.alive):
            return
        killer = Session(self.link, ["/bin/sh", "-c", _END, "sh", str(self.pid)])
        with suppress(Exception):  # the caller reports lost connections anyway
            killer.channel = opened.open_channel(killer.line)
            killer.drain(MAX_NOISE)
        killer.close()

    def close(self) -> None:
        """Close the channel and free its slot."""
        with self._gate:
            self._closed = True
            held, self._holds = self._holds, False
        if self.channel is not None:
            with suppress(Exception):
                self.channel.close()
        if held:
            self.link.slots.release()
