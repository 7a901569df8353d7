"""The cost of a small file is bounded at every level, in bytes decompressed and lines parsed instead of seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from counting import counted_lines, lines_run
from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.findings import ExamineOptions
from gpuwarden.checkpoints.formats import jsonl
from gpuwarden.checkpoints.load import load
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from wording import Wording


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """An 8 kB archive that decompresses to 8 MiB."""
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 20))
    return tmp_path / "bomb.npz"


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.CONTENT, Level.LOAD])
def test_an_archive_is_not_decompressed_beyond_its_limit(
    bomb: Path, level: Level, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    pieces: list[int] = []
    inflate = zips.inflate

    def counted(*args: object) -> object:
        for piece in inflate(*args):  # type: ignore[arg-type]
            pieces.append(len(piece))
            yield piece

    monkeypatch.setattr(zips, "inflate", counted)
    limits = Limits(unpacked=1 << 20)
    report = verify(bomb, level, limits=limits)
    assert report.verdict is Verdict.UNKNOWN and report.causes == (Cause.LIMIT,)
    wording(seen(report), "8,388,736")
    assert sum(pieces) <= 1 << 20
    assert verify(bomb, level).verdict is Verdict.PROVEN  # small data is read whatever its compression ratio


def test_default_limits_exclude_2_gb_unpacked_from_2_mb() -> None:
    assert Limits().unpacked < 2 << 30
    assert Limits().unpack_ratio * (2 << 20) < 2 << 30


def test_lines_beyond_the_limit_are_reported_as_unproved(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": 1.5}) + "\n" for i in range(100_000)))
    with Source(path) as source:
        found = jsonl.read(source, Limits(lines=1000))
    wording("\n".join(found.unproved), "1,000")
    with Source(path) as source:
        found = jsonl.read(source, Limits())
    wording("\n".join(found.proved), "100,000")
    assert not found.unproved


def test_a_json_line_costs_few_steps(tmp_path: Path) -> None:
    """A good line runs two lines of Python; a call of `json.loads` would run more than ten."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 12345, "loss": 1.25}\n' * 200_000)
    with Source(path) as source:
        assert lines_run(lambda: jsonl.read(source, Limits())) < 3 * 200_000


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"a": 1', id="cut"),
        pytest.param(b"{'a': 1}", id="quotes"),
        pytest.param(b'{"a": 1} x', id="more"),
        pytest.param(b"\xff", id="not text"),
        pytest.param(b"\0\0", id="zeros"),
    ],
)
def test_a_bad_line_among_good_lines_is_found(tmp_path: Path, line: bytes, wording: Wording) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 2 + line + b"\n" + b'{"a": 1}\n' * 2)
    report = verify(path, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)) as theirs:
        json.loads(line.decode())
    wording(seen(report), theirs.value, 3)


def test_unusual_json_lines_and_a_cut_last_line_are_accepted(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  {"a": 1}  \r\n{"a": NaN}\n{"a": 2')
    with Source(path) as source:
        found = jsonl.read(source, Limits())
    wording("\n".join([*found.proved, *found.warnings]), "NaN")


@pytest.mark.prove
def test_verification_cost_is_linear_in_the_tensor_count(tmp_path: Path) -> None:
    def cost(count: int) -> int:
        ranges = ([16 * i, 16 * i + 16] for i in range(count))
        header = {f"l.{i}.w": {"dtype": "F32", "shape": [4], "data_offsets": at} for i, at in enumerate(ranges)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = tmp_path / f"{count}.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + np.ones(4 * count, "f4").tobytes())
        with counted_lines() as lines:
            assert verify(path, Level.CONTENT).verdict is Verdict.PROVEN
            return lines()

    assert cost(100_000) < 4.4 * cost(25_000)


@pytest.mark.slow
def test_a_file_lost_before_loading_is_unknown(tmp_path: Path) -> None:
    for name in ("kept.npy", "taken away.npy"):
        np.save(tmp_path / name, np.ones(4))
    found = examine(tmp_path, ExamineOptions())
    (tmp_path / "taken away.npy").unlink()
    load(found, list(found.entries.values()))
    assert [(path, e.verdict, e.causes) for path, e in found.entries.items()] == [
        ("kept.npy", "proven", []),
        ("taken away.npy", "unknown", [Cause.CHANGING]),
    ]
