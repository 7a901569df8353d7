"""Split a large file into parts, as in an S3 multipart upload, and compute one digest over the digests of all parts."""

from __future__ import annotations

from typing import Any

PART = 8 << 20
MOST_PARTS = 9_000  # S3 allows 10,000


def part_size(size: int) -> int:
    """Return a file's part size in bytes. `remote/runner/parts.py` has the same rule."""
    step = PART
    while size > step * MOST_PARTS:
        step *= 2
    return step


class PartsDigest:
    """Compute the SHA-256 over the SHA-256 of each part, which is S3's COMPOSITE checksum."""

    def __init__(self, step: int) -> None:
        import hashlib

        self.step, self.left, self.new = step, step, hashlib.sha256
        self.part, self.whole = self.new(), self.new()

    def update(self, data: Any) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data)
        while len(view):
            piece = view[: self.left]
            self.part.update(piece)
            self.left -= len(piece)
            view = view[len(piece) :]
            if not self.left:
                self.close()

    def close(self) -> None:
        """Add the digest of the current part, and start the next part."""
        self.whole.update(self.part.digest())
        self.part, self.left = self.new(), self.step

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far; the last part may be shorter."""
        if self.left < self.step:
            self.close()
        return self.whole.hexdigest()
