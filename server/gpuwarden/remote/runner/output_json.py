"""Replies: JSON lines on stdout."""

from __future__ import annotations

import json
import sys

from gpuwarden.remote.runner.protocol import Json

ENCODE = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` makes an encoder for every line


def reply(answer: Json | list[Json], now: bool = True) -> None:
    """Print one JSON line, flushed now or with the next ones. A closed stdout is ignored."""
    try:
        sys.stdout.write(ENCODE(answer) + "\n")
        if now:
            sys.stdout.flush()
    except OSError:
        pass
