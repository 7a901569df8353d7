"""Answers: JSON lines on stdout."""

from __future__ import annotations

import json
import sys

from gpuwarden.remote.runner.protocol import Json


def reply(answer: Json, now: bool = True) -> None:
    """One JSON line, at once or with the next ones. A listener that went away changes nothing."""
    try:
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        if now:
            sys.stdout.flush()
    except OSError:
        pass
