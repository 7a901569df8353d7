"""A TCP proxy on loopback that cuts connections at chosen points, and a clock that barely waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import anyio
import pytest

from gpuwarden.core.clock import SystemClock
from sshd import Sshd


class CuttingProxy:
    """Forward TCP to a port, and cut all connections after given numbers of forwarded bytes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.server.getsockname()[1])
        self.lock = threading.Lock()
        self.budget: int | None = None
        self.next_cut: Callable[[], int | None] = lambda: None
        self.cuts = 0
        self.down = 0
        self.live: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for sock in (client, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.live |= {client, far}
            for a, b, down in ((client, far, False), (far, client, True)):
                threading.Thread(target=self._pump, args=(a, b, down), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket, down: bool) -> None:
        try:
            while data := a.recv(65536):
                with self.lock:
                    if self.budget is not None and len(data) >= self.budget:
                        data = data[: self.budget]
                        b.sendall(data)
                        self.down += len(data) * down
                        self._cut()
                        return
                    if self.budget is not None:
                        self.budget -= len(data)
                    self.down += len(data) * down
                b.sendall(data)
        except OSError:
            pass
        finally:
            for sock in (a, b):
                sock.close()

    def _cut(self) -> None:
        self.cuts += 1
        self.budget = self.next_cut()
        for sock in self.live:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.live.clear()

    def arm(self, next_cut: Callable[[], int | None]) -> None:
        """Start cutting. Each call of `next_cut` returns the number of bytes until the next cut, or None to stop."""
        with self.lock:
            self.next_cut = next_cut
            self.budget = next_cut()

    def close(self) -> None:
        self.server.close()
        with self.lock:
            self._cut()


class NoWait(SystemClock):
    """A clock that sleeps only as long as a thread needs to react."""

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(0.01)


@pytest.fixture(name="proxy")
def proxy_fixture(sshd: Sshd) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(sshd.port)
    yield proxy
    proxy.close()
