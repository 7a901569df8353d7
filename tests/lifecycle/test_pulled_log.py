"""The log saved by a pull: a lost part is reported in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.backends.base import Backend
from gpuwarden.core.models import Handle, LogChunk, Place
from gpuwarden.core.safe_names import LOG_NAME, STAGING
from gpuwarden.lifecycle.artifacts import pull

pytestmark = pytest.mark.anyio
LINES = "".join(f"step {n} é\n" for n in range(50)).encode()


class Rotated(Backend):
    """A backend whose log no longer has the bytes before `first`."""

    def __init__(self, first: int) -> None:
        self.first = first

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 1 << 16) -> LogChunk:
        start = max(cursor, self.first)
        end = min(len(LINES), start + limit)
        text = LINES[start:end].decode()
        return LogChunk(text=text, next=end, size=len(LINES), truncated=cursor < self.first)


@pytest.mark.parametrize("first", [0, LINES.index(b"step 20")])
async def test_a_pulled_log_without_its_beginning_starts_with_a_note(tmp_path: Path, first: int) -> None:
    (tmp_path / STAGING).mkdir()
    handle = Handle(backend="ssh", token="t", run_dir="/r", place=Place(platform="p", run_root="/"))
    path, lost = await pull._pull_log(Rotated(first), handle, tmp_path, ())
    assert (path, lost) == (tmp_path / LOG_NAME, first)
    head, _, rest = path.read_text("utf-8").partition("step")
    assert f"step{rest}".encode() == LINES[first:]
    assert (f"{first:,}" in head and head.endswith("\n")) if first else head == ""


async def test_a_log_beyond_the_limit_counts_the_omitted_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / STAGING).mkdir()
    monkeypatch.setattr(pull, "LOG_LIMIT", len(LINES) - LINES.index(b"step 9"))
    handle = Handle(backend="ssh", token="t", run_dir="/r", place=Place(platform="p", run_root="/"))
    _, lost = await pull._pull_log(Rotated(0), handle, tmp_path, ())
    assert lost == LINES.index(b"step 9")
