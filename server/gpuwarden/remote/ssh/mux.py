"""Run commands through the control socket of a running `ssh -M`, as specified in OpenSSH's PROTOCOL.mux (version 4).

A client passes three pipes to the master and reads the exit code from a socket. A command takes about a millisecond
to start. `ssh -S` would take four milliseconds, and would not distinguish a signal from a lost connection.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

VERSION: Final = 4
TICK_S: Final = 0.2
ANSWER_S: Final = 15.0
PIPE_BYTES: Final = 1 << 20
_HELLO: Final = 1
_NEW_SESSION: Final = 0x10000002
_ALIVE_CHECK: Final = 0x10000004
_TERMINATE: Final = 0x10000005
_OPENED: Final = 0x80000006
_EXITED: Final = 0x80000004
_ALIVE: Final = 0x80000005
_FAILED: Final = 0x80000003
_NO_ESCAPE: Final = 0xFFFFFFFF
_MAX_PACKET: Final = 1 << 18


class SessionRefused(OSError):
    """The machine currently refuses additional sessions. The command was not started."""


def _packed(*fields: int | bytes) -> bytes:
    """Encode one packet, with 32-bit integers and length-prefixed strings."""
    parts = (
        struct.pack(">I", field) if isinstance(field, int) else struct.pack(">I", len(field)) + field
        for field in fields
    )
    packet = b"".join(parts)
    return struct.pack(">I", len(packet)) + packet


class Control:
    """One connection to a control socket. All calls block.

    An open connection keeps the master alive. If this process is killed, the master exits after `ControlPersist`
    seconds.
    """

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._turn = threading.Lock()
        try:
            self._sock.settimeout(ANSWER_S)
            self._sock.connect(str(path))
            self._sock.sendall(_packed(_HELLO, VERSION))
            kind, rest = self.receive()
            if (kind, rest[:4]) != (_HELLO, struct.pack(">I", VERSION)):
                raise ConnectionError("the ssh client uses a different version of the multiplexing protocol")
        except BaseException:
            self._sock.close()
            raise

    def receive(self) -> tuple[int, bytes]:
        """Return the type and content of the next packet. Raises `ConnectionError` at the end of the stream."""
        size = struct.unpack(">I", self._exactly(4))[0]
        if not 4 <= size <= _MAX_PACKET:
            raise ConnectionError("the ssh client sent an invalid packet")
        packet = self._exactly(size)
        return struct.unpack(">I", packet[:4])[0], packet[4:]

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._sock.recv(size - len(data))
            if not piece:
                raise ConnectionError("the ssh client closed its control socket")
            data += piece
        return data

    def alive(self) -> bool:
        """Return whether the master's event loop responds."""
        with self._turn:
            try:
                self._sock.sendall(_packed(_ALIVE_CHECK, 1))
                return self.receive()[0] == _ALIVE
            except OSError:
                return False

    def pid(self) -> int:
        """Return the master's process id. Raises `OSError` if the master has exited."""
        with self._turn:
            self._sock.sendall(_packed(_ALIVE_CHECK, 1))
            return int(struct.unpack(">II", self.receive()[1][:8])[1])

    def terminate(self) -> None:
        """Terminate the master and its connection."""
        with self._turn, suppress(OSError):
            self._sock.sendall(_packed(_TERMINATE, 2))
            self._sock.settimeout(2)
            while self._sock.recv(4096):
                pass

    def open_session(self, command: bytes, ends: tuple[int, int, int]) -> None:
        """Start a command with these descriptors as its stdin, stdout and stderr.

        Raises `SessionRefused` if the machine refuses the session, and `ConnectionError` if the master does not reply.
        """
        self._sock.sendall(_packed(_NEW_SESSION, 1, b"", 0, 0, 0, 0, _NO_ESCAPE, b"", command))
        for end in ends:
            socket.send_fds(self._sock, [b"\0"], [end])
        kind, rest = self.receive()
        if kind != _OPENED:
            why = rest[8:] if kind == _FAILED else b"it was not permitted"
            raise SessionRefused(why.decode("utf-8", "replace")[:300])
        self._sock.setblocking(False)

    def exit_code(self) -> int | None:
        """Return the exit code.

        Raises `BlockingIOError` until it arrives, and `ConnectionError` if it can no longer arrive.
        """
        while True:
            size = struct.unpack(">I", self._peeked(4))[0]
            packet = self._peeked(4 + size)[4:]
            self._sock.recv(4 + size)
            kind, *rest = struct.unpack(f">{len(packet) // 4}I", packet[: len(packet) // 4 * 4])
            if kind == _EXITED:
                return int(rest[1])

    def _peeked(self, size: int) -> bytes:
        data = self._sock.recv(size, socket.MSG_PEEK)
        if not data:
            raise ConnectionError("the ssh client closed its control socket")
        if len(data) < size:
            raise BlockingIOError
        return data

    def fileno(self) -> int:
        """Return the socket's file descriptor, for use with `select`."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection. A command that was started over this connection loses its pipes."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __del__(self) -> None:
        # If a task is canceled while its thread opens this connection, no other code closes it, and the master would
        # keep running.
        if sock := self.__dict__.get("_sock"):
            sock.close()


class MuxChannel:
    """One command, as a `Channel`. Methods wait at most `TICK_S` seconds before raising `TimeoutError`."""

    def __init__(self, socket_path: Path, held: Control, command: bytes) -> None:
        self._held = held
        self._gate = threading.Lock()
        self._closed = self._ended = False
        self._code: int | None = None
        pipes = [os.pipe() for _ in range(3)]
        self._stdin, self._stdout, self._stderr = pipes[0][1], pipes[1][0], pipes[2][0]
        theirs = (pipes[0][0], pipes[1][1], pipes[2][1])
        self._control: Control | None = None
        self._err = bytearray()
        try:
            for end in (self._stdin, self._stdout):
                _widen(end)
            os.set_blocking(self._stdin, False)
            os.set_blocking(self._stdout, False)
            self._control = Control(socket_path)
            self._control.open_session(command, theirs)
        except BaseException:
            self.close()
            raise
        finally:
            for end in theirs:
                os.close(end)

    def send(self, data: memoryview) -> int:
        """Send data to stdin and return the number of bytes accepted.

        Raises `BrokenPipeError` if the command closed stdin.
        """
        with self._gate:
            self._check(self._stdin)
            try:
                return os.write(self._stdin, data)
            except BlockingIOError:
                self._wait(select.POLLOUT, self._stdin, TICK_S)
            return os.write(self._stdin, data)

    def end_input(self) -> None:
        """Close stdin."""
        with self._gate:
            if self._stdin >= 0:
                os.close(self._stdin)
                self._stdin = -1

    def receive_into(self, buffer: memoryview, wait_s: float = TICK_S) -> int:
        """Read from stdout and return the number of bytes, 0 at the end.

        Raises `ConnectionError` if the connection ended early.
        """
        with self._gate:
            self._check(self._stdout)
            self._wait(select.POLLIN, self._stdout, wait_s)
            count = got = os.readv(self._stdout, [buffer])
            with suppress(BlockingIOError):  # reading again is faster than returning to the caller
                while got and count < len(buffer) // 2:
                    got = os.readv(self._stdout, [buffer[count:]])
                    count += got
        if not count and not (self.exited() and self._code is not None) and not self._held.alive():
            raise ConnectionError("the connection was lost during output")
        return count

    def errors(self) -> bytes:
        """Return stderr output received since the last call, without waiting."""
        with self._gate:
            if not self._closed:
                self._drain()
            errors, self._err = bytes(self._err), bytearray()
            return errors

    def exited(self) -> bool:
        """Return whether the command is known to have ended."""
        with self._gate:
            return self._closed or self._poll_exit()

    def code(self) -> int | None:
        """Return the exit code, or None if a signal ended the command.

        Raises `ConnectionError` if the connection is lost.
        """
        with self._gate:
            self._check(self._stdout)
            if not self._poll_exit():
                assert self._control
                select.select([self._control], [], [], TICK_S)
            if not self._poll_exit():
                raise TimeoutError
        if self._code is None and not self._held.alive():
            raise ConnectionError("the connection ended before the command did")
        return self._code

    def _poll_exit(self) -> bool:
        """Return whether the exit code has arrived or can no longer arrive, without waiting."""
        try:
            if not self._ended and self._control:
                self._code, self._ended = self._control.exit_code(), True
        except BlockingIOError:
            return False
        except OSError:
            self._ended = True
        return self._ended

    def _check(self, end: int) -> None:
        if self._closed or end < 0:
            raise BrokenPipeError("the channel is closed")

    def _wait(self, event: int, end: int, wait_s: float) -> None:
        """Wait for one pipe while reading stderr, so that a full stderr pipe never blocks the command."""
        poll = select.poll()
        poll.register(end, event)
        if self._stderr >= 0:
            poll.register(self._stderr, select.POLLIN)
        ready = dict(poll.poll(wait_s * 1000))
        if self._stderr in ready:
            self._drain()
        if end not in ready:
            raise TimeoutError

    def _drain(self) -> None:
        """Read the available stderr output, and close the pipe when the output ends."""
        while self._stderr >= 0 and select.select([self._stderr], [], [], 0)[0]:
            piece = os.read(self._stderr, 1 << 16)
            if not piece:
                os.close(self._stderr)
                self._stderr = -1
            elif len(self._err) < 1 << 20:
                self._err += piece

    def close(self) -> None:
        """Close the command's control connection and its pipes."""
        if self._control is not None:
            self._control.close()  # wakes a thread that is waiting for a pipe
        with self._gate:
            self._closed = True
            for end in (self._stdin, self._stdout, self._stderr):
                if end >= 0:
                    os.close(end)
            self._stdin = self._stdout = self._stderr = -1

    def __del__(self) -> None:
        if "_err" in self.__dict__:  # the constructor has opened the pipes
            self.close()


def _widen(pipe: int) -> None:
    """Enlarge a pipe on Linux, to reduce context switches."""
    if sys.platform == "linux":
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
