"""Redact secret values in all written text."""

from __future__ import annotations

import os
import re

MASK = b"***"
MIN_SECRET = 4  # masking short values such as "1" or "no" would make logs unreadable


class Redactor:
    """Masks secret values in text that arrives in pieces, with the same result as for the complete text.

    If the end of a piece may be the start of a secret, that end is held until the next piece. Each line of a
    multi-line secret is masked too.
    """

    def __init__(self, secrets: list[str]) -> None:
        values: set[str] = set()
        for text in secrets:
            values.update(v for v in [text] if len(v) >= MIN_SECRET)
            values.update(v for v in text.splitlines() if len(v) >= 2 * MIN_SECRET)
        self.values = sorted((os.fsencode(v) for v in values), key=lambda v: (-len(v), v))
        self.longest = max(map(len, self.values), default=0)
        self.heads = {v[0] for v in self.values}
        self.pattern = re.compile(b"|".join(map(re.escape, self.values))) if self.values else None
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        """Add the next piece. Return the redacted text, holding back an end that may be the start of a secret."""
        if self.pattern is None:
            return data
        data, out, at = self.held + data, [], 0
        hold = self._hold(data, at)
        for match in self.pattern.finditer(data):
            if match.start() >= hold:  # this may be the start of a longer secret
                break
            out += [data[at : match.start()], MASK]
            at = match.end()
            hold = self._hold(data, at)
        out.append(data[at:hold])
        self.held = data[hold:]
        return b"".join(out)

    def finish(self) -> bytes:
        """Return the text that is still held, redacted."""
        held, self.held = self.held, b""
        return self.pattern.sub(MASK, held) if self.pattern else held

    def text(self, text: str) -> str:
        """Return a complete text with secrets masked."""
        if self.pattern is None:
            return text
        return os.fsdecode(self.pattern.sub(MASK, os.fsencode(text)))

    def _hold(self, data: bytes, start: int) -> int:
        for at in range(max(start, len(data) - self.longest + 1), len(data)):
            if data[at] in self.heads:
                tail = data[at:]
                if any(len(v) > len(tail) and v.startswith(tail) for v in self.values):
                    return at
        return len(data)
