"""Limit the whole wait for a platform. Each of its replies has a separate limit; a list may need many replies."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from gpuwarden.core.models import Answer, Unknown

T = TypeVar("T")
ASK_S = 45.0
"""What one question to a platform may take with all its pages: less than the minute that callers of a tool wait."""


async def in_time(platform: str, question: Awaitable[Answer[T]]) -> Answer[T]:
    """Return the answer to a question, or Unknown when it was not there in time."""
    try:
        with anyio.fail_after(ASK_S):
            return await question
    except TimeoutError:
        return Unknown(f"{platform} did not finish its answer in {ASK_S:g} s")
