"""The log returns each kept byte once, whatever the output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.remote.runner.log import Log, log_size, read_log, segments
from runner_kit import call, ended, log, sh


@given(
    pieces=st.lists(st.text(max_size=600), max_size=12),
    limit=st.integers(1, 4000),
    max_bytes=st.integers(1000, 9000),
)
@settings(max_examples=60, deadline=None)
def test_following_a_log_reads_every_kept_byte_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], limit: int, max_bytes: int
) -> None:
    folder = str(tmp_path_factory.mktemp("log"))
    writer = Log(folder, max_bytes)
    for piece in pieces:
        writer.write(piece.encode("utf-8", "surrogatepass"))
    os.close(writer.fd)
    whole = "".join(pieces).encode("utf-8", "surrogatepass")
    first = segments(folder)[0][0]
    cursor, texts, size = first, [], log_size(folder)
    assert size == len(whole)
    while cursor < size:
        chunk = read_log(folder, cursor, limit)
        assert chunk["next"] > cursor and not chunk["truncated"]
        cursor = chunk["next"]
        texts.append(chunk["text"])
    kept = whole[first:]
    assert "".join(texts).encode() == kept.decode("utf-8", "replace").encode()
    assert read_log(folder, 0, limit)["truncated"] is (first > 0)


@pytest.mark.slow
def test_a_rotated_log_keeps_its_cursors(folder: Path) -> None:
    call(
        "start",
        folder,
        sh("for i in 1 2 3 4 5 6 7 8 9; do head -c 1000 /dev/zero | tr '\\0' $i; done", log_max_bytes=4096),
    )
    ended(folder)
    seen = call("logs", folder, {"cursor": 0, "limit": 1 << 20})
    assert seen["truncated"] and seen["size"] == 9000
    assert seen["text"] == "".join(str(i) * 1000 for i in range(1, 10))[9000 - len(seen["text"]) :]
    assert call("logs", folder, {"cursor": 8500})["text"] == "9" * 500
    assert call("logs", folder, {"cursor": -10})["text"] == "9" * 10
    assert call("logs", folder, {"cursor": 99_999})["truncated"]
    assert os.readlink(folder / "out.log") == Path(segments(str(folder))[-1][1]).name


def test_a_one_megabyte_line_is_kept_whole(folder: Path) -> None:
    call("start", folder, sh("head -c 1048576 /dev/zero | tr '\\0' x; echo"))
    ended(folder)
    assert log(folder) == "x" * 1048576 + "\n"
