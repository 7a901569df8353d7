"""Replies: JSON lines on stdout."""

from __future__ import annotations

import json
import sys

from gpuwarden.remote.runner.protocol import Json


def reply(answer: Json, now: bool = True) -> None:
    """Print one JSON line, flushed now or with the next ones. A closed stdout is ignored."""
    try:
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        if now:
            sys.stdout.flush()
    except OSError:
        pass
