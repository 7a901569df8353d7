"""The cost of any pickle is bounded at every level, in lines of Python and in memory."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from counting import lines_run
from gpuwarden.checkpoints.budget import ByteCount
from gpuwarden.checkpoints.file_model import NO_LIMITS, Limits, short
from gpuwarden.checkpoints.load_child import load_one
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Verdict
from pickle_kit import name, text, zip_file

MOST_LINES, MEMORY = 60, 1 << 30
"""Limits for one file beyond reading its bytes: lines of Python per allowed opcode, and bytes of memory.

The most expensive known file runs 42 lines per opcode. The 20 s that the documentation promises are enough for 60 lines
for each of 4 million opcodes.
"""
SCALE = 50
SMALL = Limits(opcodes=Limits().opcodes // SCALE, tensors=Limits().tensors // SCALE, pickle=Limits().pickle // SCALE)

_STORAGE = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQq\x01"
_FIRST = (
    name("torch._utils", "_rebuild_tensor_v2") + b"q\x02(" + _STORAGE + b"K\x00K\x01\x85K\x01\x85\x89"
    + name("collections", "OrderedDict") + b"q\x03)RtRq\x05"
)  # fmt: skip
_NEXT = b"h\x02(h\x01K\x00K\x01\x85K\x01\x85\x89h\x03)RtR"


def _doubling() -> bytes:
    """Return lists nested sixty deep, each with the previous one twice: a billion billion elements in a few bytes."""
    return b"]q\x100" + b"".join(b"](h%ch%ceq%c0" % (i, i, i + 1) for i in range(16, 76))


def _many_tensors(n: int) -> bytes:
    out = io.BytesIO()
    out.write(b"\x80\x02}(" + text("first") + _FIRST)
    for i in range(n // 18):
        out.write(text(f"layers.{i}.w") + _NEXT)
    return out.getvalue() + b"u."


def _deep_names(n: int) -> bytes:
    deep = b"".join(b"}" + text("k" * 190) for _ in range(90))
    return b"\x80\x02" + deep + b"](" + _FIRST + b"h\x05" * (n // 10) + b"e" + b"s" * 90 + b"."


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "many tensors": _many_tensors,
    "one tensor many times": lambda n: b"\x80\x02](" + _FIRST + b"h\x05" * n + b"e.",
    "deep names": _deep_names,
    "a list in itself": lambda n: b"\x80\x02](" + _FIRST + b"e]q\x06(" + b"h\x06" * n + b"ea.",
    "an enormous dtype": lambda n: (
        b"\x80\x02" + _doubling() + name("torch._utils", "_rebuild_tensor_v3") + b"(" + _STORAGE
        + b"K\x00K\x01\x85K\x01\x85\x89}hLtR."
    ),
    "an enormous argument": lambda n: b"\x80\x02" + _doubling() + name("numpy", "dtype") + b"hL\x85R.",
    "an enormous key": lambda n: b"\x80\x02" + _doubling() + b"}hL\x85Ns.",
    "an enormous state": lambda n: b"\x80\x02" + _doubling() + name("argparse", "Namespace") + b")\x81hLb.",
    "names": lambda n: b"\x80\x02" + b"".join(b"ca\n%x\n0" % i for i in range(n // 2)) + b"N.",
    "empty steps": lambda n: b"\x80\x02" + b"N0" * (n // 2) + b"N.",
    "tables": lambda n: b"\x80\x02](" + b"}" * n + b"e.",
    "calls": lambda n: b"\x80\x02" + name("types", "SimpleNamespace") + b"q\x000](" + b"h\x00)R}b" * (n // 5) + b"e.",
    "depth": lambda n: b"\x80\x02" + b"]" * (n // 2) + b"a" * (n // 2 - 1) + b".",
    "references": lambda n: b"\x80\x02](" + (b"(" + text("module") + b"NNNtQ") * (n // 7) + b"e.",
    "texts": lambda n: b"\x80\x02](" + b"".join(text(f"{i:x}") for i in range(n)) + b"e.",
    "bytes": lambda n: b"\x80\x04](" + b"B" + struct.pack("<I", 14 * n) + bytes(14 * n) + b"e.",
}  # fmt: skip


def memory(path: Path, level: Level, limits: Limits) -> int:
    """Return the peak memory of one verification in bytes, with every allocation counted."""
    tracemalloc.start()
    try:
        verify(path, level, limits=limits)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MEASURE = """
import re, sys
from pathlib import Path
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level

def most():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = most()
verify(Path(sys.argv[1]), Level.CONTENT)
print(most() - before)
"""


def memory_in_full(path: Path) -> int:
    """Return the peak memory of one verification in bytes. A load has its own process, with a separate limit.

    Linux records the peak of a process. Counting every allocation instead takes five times as long.
    """
    if sys.platform != "linux":
        return memory(path, Level.CONTENT, Limits())
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("what", "container"), [*((what, "zip") for what in HOSTILE), *((what, "plain") for what in list(HOSTILE)[-3:])]
)
def test_cost_scales_down_with_the_limits(tmp_path: Path, what: str, container: str) -> None:
    data = HOSTILE[what](SMALL.opcodes - 500)
    path = tmp_path / ("model.pt" if container == "zip" else "state.pkl")
    if container == "zip":
        zip_file(path, data, {"data/0": bytes(4)})
    else:
        path.write_bytes(data)
    assert lines_run(lambda: verify(path, Level.CONTENT, limits=SMALL)) < MOST_LINES * SMALL.opcodes
    assert memory(path, Level.LOAD, SMALL) < MEMORY / SCALE


@pytest.mark.prove
@pytest.mark.parametrize("what", HOSTILE)
def test_memory_at_full_limits_stays_within_the_promise(tmp_path: Path, what: str) -> None:
    path = zip_file(tmp_path / "model.pt", HOSTILE[what](Limits().opcodes - 500), {"data/0": bytes(4)})
    # Quadratic work on this many opcodes would exceed the test's time limit.
    assert memory_in_full(path) < MEMORY


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_process_memory_is_measured(tmp_path: Path) -> None:
    path = zip_file(tmp_path / "model.pt", HOSTILE["texts"](100_000), {"data/0": bytes(4)})
    assert memory_in_full(path) > 0.8 * memory(path, Level.CONTENT, Limits())


@pytest.mark.parametrize(
    ("what", "limits"),
    [
        ("many tensors", Limits(opcodes=5_000)),
        ("names", Limits(names=100)),
        ("one tensor many times", Limits(tensors=9)),
    ],
)
def test_exceeding_a_limit_is_unknown(tmp_path: Path, what: str, limits: Limits) -> None:
    path = zip_file(tmp_path / "model.pt", HOSTILE[what](10_000), {"data/0": bytes(4)})
    report = verify(path, Level.STRUCTURE, limits=limits)
    assert report.verdict is Verdict.UNKNOWN and report.causes == (Cause.LIMIT,), report.reasons
    for more in (Limits(), NO_LIMITS):
        assert Cause.LIMIT not in verify(path, Level.STRUCTURE, limits=more).causes


def test_an_archive_is_not_unpacked_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "results.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for i in range(4):
            out.writestr(f"{i}.txt", bytes(1 << 20))
    limits = Limits(unpacked=3 << 20)
    report = verify(path, Level.CONTENT, limits=limits)
    assert report.causes == (Cause.LIMIT,), report.reasons
    assert verify(path, Level.STRUCTURE, limits=limits).verdict is Verdict.PROVEN
    assert verify(path, Level.CONTENT).verdict is Verdict.PROVEN


def test_an_enormous_value_is_abbreviated() -> None:
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    value.append(value)
    assert len(short(value)) <= 120 and len(short({"a": value}, 40)) <= 40
    assert short("a\nb") == "a?b" and short(7) == "7"


def test_an_expanded_element_is_counted_without_copies(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    repeated = _FIRST.replace(b"K\x00K\x01\x85K\x01\x85", b"K\x00J\xff\xff\xff\x7f\x85K\x00\x85")
    path = zip_file(tmp_path / "model.pt", b"\x80\x04" + repeated + b".", {"data/0": bytes(4)})
    assert verify(path, Level.CONTENT).verdict is Verdict.PROVEN
    tracemalloc.start()
    answer = load_one(path, "model.pt", "")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer["elements"] == (1 << 31) - 1 and most < 10 << 20


@pytest.mark.parametrize("alone", [True, False])
def test_progress_has_a_total_before_the_first_byte_is_counted(tmp_path: Path, alone: bool) -> None:
    whole = b"\x80\x02" + _FIRST.replace(b"cpuK\x01t", b"cpuJ" + struct.pack("<i", 1 << 14) + b"t") + b"."
    for i in range(3):
        zip_file(tmp_path / f"{i}.pt", whole, {"data/0": bytes(1 << 16)})
    seen: list[tuple[int, int | None]] = []
    path = tmp_path / "0.pt" if alone else tmp_path
    verify(path, Level.CONTENT, progress=ByteCount(lambda done, total: seen.append((done, total))))
    size = sum(p.stat().st_size for p in ([path] if alone else tmp_path.iterdir()))
    assert seen[0] == (0, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] > 0.9 * (1 << 16) and all(total is not None and done <= total for done, total in seen)


def test_structure_level_announces_no_total(tmp_path: Path) -> None:
    seen: list[object] = []
    path = zip_file(tmp_path / "a.pt", b"\x80\x02}.")
    verify(path, Level.STRUCTURE, progress=ByteCount(lambda done, total: seen.append(total)))
    assert not seen or set(seen) == {None}
