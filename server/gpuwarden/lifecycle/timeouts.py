"""Limit the total time of a query to a platform or an artifact store.

Each reply also has a separate time limit, but a list may consist of many replies.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from gpuwarden.core.models import Answer, Unknown

T = TypeVar("T")
ASK_S = 45.0
"""Seconds for one query to a platform, including all pages. An MCP client may wait only a minute."""

STORE_S = 60.0
"""Seconds for one check of an artifact store. The job is locked during the check."""
STORE_FILE_S = 0.02
"""Additional seconds per file. S3 needs one request per file; several requests run concurrently."""
MOST_STORE_S = 600.0


def store_limit(files: int) -> float:
    """Return the time limit in seconds for checking a number of files in an artifact store."""
    return min(STORE_S + files * STORE_FILE_S, MOST_STORE_S)


async def in_time(platform: str, question: Awaitable[Answer[T]]) -> Answer[T]:
    """Return the answer to a query, or Unknown after `ASK_S` seconds."""
    try:
        with anyio.fail_after(ASK_S):
            return await question
    except TimeoutError:
        return Unknown(f"{platform} did not send a complete response within {ASK_S:g} s")
