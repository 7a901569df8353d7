"""Send events to a URL."""

from __future__ import annotations

import json
import time
from typing import Any

from gpuwarden.remote.runner.protocol import Json


class Post:
    """Send events to a URL from a separate thread: bounded queue, retries with back-off, never blocks the job."""

    def __init__(self, url: str, token: str, job: str) -> None:
        import collections
        import threading

        self.url, self.token, self.job = url, token, job
        self.queue: Any = collections.deque(maxlen=1000)
        self.wake = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, event: Json) -> None:
        """Queue an event; the oldest is dropped when a thousand wait."""
        self.idle.clear()
        self.queue.append(event)
        self.wake.set()

    def flush(self, seconds: float) -> None:
        """Wait briefly until everything was sent."""
        self.idle.wait(seconds)

    def _work(self) -> None:
        pause = 1.0
        while True:
            batch = list(self.queue)[:100]
            if not batch:
                self.wake.clear()
                if not self.queue:
                    self.idle.set()
                    self.wake.wait()
            elif self._send(batch):
                pause = 1.0
                for _ in batch:
                    self.queue.popleft() if self.queue else None
            else:
                time.sleep(pause)
                pause = min(pause * 2, 60.0)

    def _send(self, batch: list[Json]) -> bool:
        import urllib.request

        body = json.dumps({"job": self.job, "events": batch}, allow_nan=False).encode("ascii")
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = "Bearer " + self.token
        try:
            request = urllib.request.Request(self.url, body, headers)  # noqa: S310 (scheme checked by the caller)
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                return bool(200 <= reply.status < 300)
        except (OSError, ValueError):
            return False
