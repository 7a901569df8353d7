"""Read part of a job's log, without secrets, for every interface that shows a log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from gpuwarden.core.models import LogChunk
from gpuwarden.core.sanitize import plain, plain_length, redacted_part
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord

MARGIN: Final = 8_192
"""Bytes around a log part that are also searched, because a cursor may split a secret of up to this length."""


@dataclass(frozen=True)
class LogPart:
    """The plain text, without secrets, of bytes `start` to `next` in a log of `size` bytes."""

    text: str
    start: int
    next: int
    size: int


async def log_part(
    ctx: Context, job: JobRecord, read: Callable[[int, int], Awaitable[LogChunk | None]], cursor: int, limit: int
) -> LogPart | None:
    """Return at most `limit` bytes of a log from a byte cursor; a negative cursor counts from the end of the log.

    A character or a secret that crosses a boundary belongs to the part that contains its first byte. `read` returns the
    bytes at a cursor; the result is None if `read` returns None.
    """
    wide = await read(cursor - MARGIN if cursor < 0 else max(0, cursor - MARGIN), limit + 2 * MARGIN)
    begin = cursor if cursor >= 0 or wide is None else wide.size + cursor
    if wide is not None and (
        wide.next < begin or wide.next == begin != wide.size
    ):  # the bytes around the cursor are missing, so let the source choose where to continue
        wide = await read(cursor, limit + MARGIN)
        begin = wide.start if wide else begin
    if wide is None:
        return None
    begin = max(begin, wide.start)
    end = min(begin + limit, wide.next)
    data = wide.data
    text = data.decode("utf-8", "replace")
    first, last = (plain_length(text, len(data[: at - wide.start].decode("utf-8", "replace"))) for at in (begin, end))
    clean = plain(text)
    return LogPart(redacted_part(clean, first, last, ctx.hidden(clean, job.spec.secrets)), begin, end, wide.size)
