"""Limit the whole wait for a platform or an artifact store.

Each of its replies has a separate limit; a list may need many replies.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from gpuwarden.core.models import Answer, Unknown

T = TypeVar("T")
ASK_S = 45.0
"""What one question to a platform may take with all its pages: less than the minute that callers of a tool wait."""

STORE_S = 60.0
"""What one look at an artifact store may take, while the job's lock is taken."""
STORE_FILE_S = 0.02
"""What each file adds to that: S3 is asked for one at a time, several at once."""
MOST_STORE_S = 600.0


def store_limit(files: int) -> float:
    """Return the seconds that a look at so many files of an artifact store may take."""
    return min(STORE_S + files * STORE_FILE_S, MOST_STORE_S)


async def in_time(platform: str, question: Awaitable[Answer[T]]) -> Answer[T]:
    """Return the answer to a question, or Unknown when it was not there in time."""
    try:
        with anyio.fail_after(ASK_S):
            return await question
    except TimeoutError:
        return Unknown(f"{platform} did not finish its answer in {ASK_S:g} s")
