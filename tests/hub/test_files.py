"""A Hub that lies about its files: no reader hangs or runs out of memory, and no truncated file passes as complete."""

from __future__ import annotations

import gzip
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import Doubtful
from gpuwarden.core.errors import BadReply
from gpuwarden.core.evidence import Cause
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.files import Address, HubFile, Listing, RangeSource, list_files
from wording import Wording

COMMIT = "a" * 40


class Storage(BaseHTTPRequestHandler):
    """A server that answers every range request with `body`, piece by piece."""

    headers_said: tuple[tuple[str, str], ...] = ()
    body: tuple[bytes, ...] = ()
    pause = 0.0

    def do_GET(self) -> None:
        self.send_response(206)
        for name, value in self.headers_said:
            self.send_header(name, value)
        self.end_headers()
        try:
            for piece in self.body:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(self.pause)
        except OSError:
            pass  # the client closed the connection

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def storage(**said: Any) -> Iterator[HubConfig]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Said", (Storage,), said))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield HubConfig.from_env({"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def opened(config: HubConfig, size: int, budget: Budget) -> RangeSource:
    listing = Listing(Address("model", "a/b"), COMMIT, {"x": HubFile(size, None)})
    return RangeSource(listing, "x", config, budget.take)


@pytest.mark.slow
def test_body_that_unpacks_beyond_the_requested_size_is_doubtful() -> None:
    packed = gzip.compress(bytes(200 << 20))
    with storage(headers_said=(("Content-Encoding", "gzip"),), body=(packed,)) as config:
        source = opened(config, 100, Budget(30, 1 << 40))
        tracemalloc.start()
        try:
            with pytest.raises(Doubtful):
                source.at(0, 100)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_slow_body_ends_at_the_time_limit(wording: Wording) -> None:
    # Sending the whole body would take longer than a test may run.
    with storage(body=(b"x",) * 60_000, pause=0.02) as config, pytest.raises(Doubtful) as ended:
        opened(config, 100_000, Budget(0.3, 1 << 40)).at(0, 100_000)
    assert ended.value.cause is Cause.LIMIT
    wording(ended)


class Pages:
    """A Hub whose file list never ends, or consists of a given row."""

    def __init__(self, row: dict[str, Any], endless: bool) -> None:
        self.row, self.endless, self.asked = row, endless, 0

    async def get(self, path: str, query: dict[str, str] | None = None) -> Any:
        self.asked += 1
        said: Any = {"sha": COMMIT} if "/revision/" in path else [self.row]
        link = f'<http://h/?cursor={self.asked}>; rel="next"' if self.endless else ""
        return type("Reply", (), {"status": 200, "json": said, "headers": {"link": link}})()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "endless"),
    [("a.safetensors", True), ("a/" * 10_000 + "a", False), ("a" * 100_000, False)],
)
async def test_endless_list_or_absurd_name_raises(path: str, endless: bool) -> None:
    hub: Any = Pages({"type": "file", "path": path, "size": 1}, endless)
    with pytest.raises(BadReply):
        await list_files(hub, Address("model", "a/b"))
    assert hub.asked < 1000
