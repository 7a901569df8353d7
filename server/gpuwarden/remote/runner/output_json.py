"""Print replies as JSON lines on stdout."""

from __future__ import annotations

import json
import sys

from gpuwarden.remote.runner.protocol import Json

ENCODE = json.JSONEncoder(allow_nan=False).encode  # faster than `json.dumps`, which creates an encoder for every line


def reply(answer: Json | list[Json], now: bool = True) -> None:
    """Print one JSON line. It is flushed at once if `now` is true, otherwise with a later line. A closed stdout is
    ignored.
    """
    try:
        sys.stdout.write(ENCODE(answer) + "\n")
        if now:
            sys.stdout.flush()
    except OSError:
        pass
