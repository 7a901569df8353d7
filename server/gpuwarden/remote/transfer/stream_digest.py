"""Receive a file that the machine hashes while sending it. One line with the digest and the file's times follows the
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Artifact

MAX_LINE = 4096


class Seal:
    """Passes a file's bytes to `take` and keeps the line that follows them."""

    def __init__(self, artifact: Artifact, take: Callable[[memoryview], object], size: int) -> None:
        self.artifact, self.take, self.left = artifact, take, size
        self.line = b""

    def __call__(self, view: memoryview) -> None:
        """Process the next piece of the stream."""
        count = min(self.left, len(view))
        if count:
            self.take(view[:count])
            self.left -= count
        if count < len(view):
            self.line = (self.line + bytes(view[count : count + MAX_LINE]))[:MAX_LINE]

    def digest(self) -> str:
        """Return the machine's digest in hex. Raises `BadReply` for a missing or invalid line, or a changed file."""
        try:
            order = json.loads(self.line) if self.left == 0 else {}
            seen = Artifact.model_validate({"path": self.artifact.path, **order})
        except (ValueError, TypeError, RecursionError):
            seen = None
        if seen is None or not seen.sha256 or (self.artifact.ctime_ns and seen.stamp != self.artifact.stamp):
            raise BadReply(
                f"{self.artifact.path} changed on the machine after the manifest was created",
                "Pull again when no process is writing to the file.",
            )
        return seen.sha256
