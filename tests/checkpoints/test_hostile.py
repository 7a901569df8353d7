"""Files that try to run code, exhaust the machine, or pose as another type: none runs, and each is reported."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import resource
import struct
import tracemalloc
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counting import counted_lines, lines_run
from gpuwarden.checkpoints import examine
from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.findings import Expected
from gpuwarden.checkpoints.layouts import deepspeed, gguf_split
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from wording import Wording

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
MOST_LINES = 20_000_000
"""Maximum lines of Python to run for a file with half a million opcodes: 40 for each."""


def zip_file(path: Path, data: bytes, extra: dict[str, bytes] | None = None) -> Path:
    """Write a torch archive around a pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n", **(extra or {})}.items():
            out.writestr(f"archive/{name}", content)
    return path


def legacy_file(path: Path, data: bytes) -> Path:
    """Write torch's older container around a pickle."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    head = b"".join(pickle.dumps(v, 2) for v in (MAGIC, PROTOCOL, system))
    path.write_bytes(head + data + pickle.dumps([], 2))
    return path


def plain_file(path: Path, data: bytes) -> Path:
    """Write a bare pickle under a checkpoint's name."""
    path.write_bytes(data)
    return path


def call(module: str, name: str, *args: str) -> bytes:
    """Return a pickle that calls module.name(*args) with GLOBAL and REDUCE."""
    items = b"".join(b"X" + struct.pack("<I", len(a.encode())) + a.encode() for a in args)
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"(" + items + b"tR."


CALLS = {
    "system": ("posix", "system", "touch {canary}"),
    "nt": ("nt", "system", "touch {canary}"),
    "os": ("os", "popen", "touch {canary}"),
    "eval": ("builtins", "eval", "open({canary!r}, 'w')"),
    "exec": ("builtins", "exec", "open({canary!r}, 'w')"),
    "exec2": ("__builtin__", "execfile", "{canary}"),
    "open": ("builtins", "open", "{canary}", "w"),
    "getattr": ("builtins", "getattr", "os", "system"),
    "import": ("builtins", "__import__", "antigravity"),
    "compile": ("builtins", "compile", "1", "a", "eval"),
    "runpy": ("runpy", "_run_code", "open({canary!r}, 'w')"),
    "subprocess": ("subprocess", "Popen", "touch {canary}"),
    "timeit": ("timeit", "timeit", "open({canary!r}, 'w')"),
    "importlib": ("importlib", "import_module", "antigravity"),
    "webbrowser": ("webbrowser", "open", "file://{canary}"),
    "pty": ("pty", "spawn", "touch {canary}"),
    "code": ("code", "interact", "x"),
    "socket": ("socket", "create_connection", "127.0.0.1"),
    "shutil": ("shutil", "rmtree", "{canary}"),
    "pickle": ("pickle", "loads", "x"),
    "ctypes": ("ctypes", "CDLL", "libc.so.6"),
    "pdb": ("pdb", "run", "open({canary!r}, 'w')"),
    "cprofile": ("cProfile", "run", "open({canary!r}, 'w')"),
    "operator": ("operator", "methodcaller", "system"),
    "hub": ("torch.hub", "load", "evil/repo"),
    "cpp": ("torch.utils.cpp_extension", "load", "evil"),
    "torch_load": ("torch.serialization", "load", "{canary}"),
    "numpy_runstring": ("numpy.testing._private.utils", "runstring", "open({canary!r}, 'w')"),
    "pip": ("pip._internal", "main", "install"),
    "stranger": ("some_package.models", "Net", "x"),
}


def seen(report: Report) -> str:
    return " ".join(line for f in report.files for line in (*f.problems, *f.doubts))


@pytest.mark.parametrize("container", [zip_file, legacy_file, plain_file])
@pytest.mark.parametrize("kind", sorted(CALLS))
def test_a_call_is_named_and_never_made(tmp_path: Path, kind: str, container: Any) -> None:
    canary = tmp_path / "canary"
    module, name, *args = (part.format(canary=str(canary)) for part in CALLS[kind])
    path = container(tmp_path / "model.pt", call(module, name, *args))
    report = verify(path, Level.LOAD)
    assert report.verdict is (Verdict.UNKNOWN if kind == "stranger" else Verdict.REFUTED), seen(report)
    assert f"{module}.{name}" in seen(report)
    assert not canary.exists()


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


TRICKS = {
    "inst": b"(" + text("touch x") + b"iposix\nsystem\n.",
    "obj": b"(cposix\nsystem\n" + text("touch x") + b"o.",
    "stack_global": b"\x80\x04" + text("posix") + text("system") + b"\x93" + text("touch x") + b"\x85R.",
    "newobj": b"\x80\x02csubprocess\nPopen\n" + text("x") + b"\x85\x81.",
    "newobj_ex": b"\x80\x04csubprocess\nPopen\n" + text("x") + b"\x85}\x92.",
    "ext": b"\x80\x02\x82\x01.",
    "build_on_global": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}" + text("__defaults__") + b"K\x01stb.",
    "call_of_call": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\n" + text("x") + b"\x86R" + text("touch x") + b"\x85R.",
    "second_stop": b"\x80\x02}." + b"cposix\nsystem\n" + text("touch x") + b"\x85R.",
    "memo_bomb": b"\x80\x02}r\xff\xff\xff\x7fX\x01\x00\x00\x00sK\x01s.",
    "memo_unfilled": b"\x80\x02h\x07.",
    "length_bomb": b"\x80\x02X\xff\xff\xff\xff.",
    "length_bomb8": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "negative_length": b"\x80\x02T\xff\xff\xff\xff.",
    "frame_bomb": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
    "int_bomb": b"I" + b"9" * 4000 + b"\n.",
    "long_bomb": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "no_stop": b"\x80\x02}",
    "empty": b"",
    "underflow": b"\x80\x02R.",
    "mark_underflow": b"\x80\x02t.",
    "protocol_99": b"\x80\x63}.",
    "deep_tuple": b"\x80\x02)" + b"\x85" * 500_000 + b".",
    "deep_marks": b"\x80\x02" + b"(" * 500_000 + b".",
    "deep_key": b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"Nu.",
    "colliding_keys": b"\x80\x02}("
    + b"".join(b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(200_000))
    + b"u.",
    "unhashable_key": b"\x80\x02}(]Nu.",
    "persistent_text": b"\x80\x02Pstorage\n.",
    "storage_with_evil_type": b"\x80\x02("
    + text("storage")
    + b"cposix\nsystem\n"
    + text("0")
    + text("cpu")
    + b"K\x01tQ.",
}


@pytest.mark.parametrize("container", [zip_file, legacy_file])
@pytest.mark.parametrize("kind", sorted(set(TRICKS) - {"memo_bomb", "second_stop", "deep_tuple"}))
def test_pickle_tricks_are_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, container: Any
) -> None:
    monkeypatch.setattr(examine, "GAVE_UP", ())  # let exceptions in a reader propagate
    report = verify(container(tmp_path / "model.pt", TRICKS[kind]), Level.CONTENT)
    assert report.verdict is not Verdict.PROVEN
    assert seen(report)


def long_path() -> bytes:
    """Return a wide, deep tree without tensors whose path names alone would take gigabytes."""
    key = text("k" * 200)
    return b"\x80\x02" + (b"}" + key) * 90 + b"](" + b"}" * 200_000 + b"e" + b"s" * 90 + b"."


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        long_path(),
        b"\x80\x02](" + b"}" * 400_000 + b"e.",
        b"\x80\x02}" + b"".join(b"r" + n.to_bytes(4, "little") for n in range(400_000)) + b".",
    ],
)
def test_a_small_files_cost_is_bounded(tmp_path: Path, data: bytes) -> None:
    path = zip_file(tmp_path / "model.pt", data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert lines_run(lambda: verify(path, Level.CONTENT)) < MOST_LINES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


CLAIMS: dict[str, tuple[Any, str, dict[str, int], str]] = {
    "number of a rank": (deepspeed, "zero_pp_rank_999999_mp_rank_{:06}_optim_states.pt", {}, "0, 1, 2 and 999,996"),
    "number of ranks": (
        deepspeed, "zero_pp_rank_0_mp_rank_{:06}_optim_states.pt", {"dp_world_size": 1_000_000}, "1, 2, 3 and 999,996",
    ),
    "number of model parts": (
        deepspeed, "zero_pp_rank_0_mp_rank_{:06}_optim_states.pt", {"mp_world_size": 1_000_000}, "5, 6, 7 and 999,992",
    ),
    "number of parts": (gguf_split, "m{}-00001-of-99999.gguf", {}, "00002, 00003, 00004 and 99,995"),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "name", "head", "missing"), CLAIMS.values(), ids=CLAIMS)
def test_a_huge_claimed_part_count_costs_no_work(layout: Any, name: str, head: dict[str, int], missing: str) -> None:
    names = [name.format(n) for n in range(5)]
    folder = Folder(Path("global_step7"), "", dict.fromkeys([*names, "mp_rank_00_model_states.pt"], 1))
    found: dict[str, Any] = defaultdict(lambda: None)
    found["mp_rank_00_model_states.pt"] = SimpleNamespace(problems=[], anatomy=SimpleNamespace(content=head))
    judged: list[str] = []
    assert lines_run(lambda: judged.extend(layout.judge(folder, found).problems)) < 2_000
    assert missing in "\n".join(judged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memo_bomb", "deep_tuple"])
def test_bombs_cost_neither_work_nor_memory(tmp_path: Path, kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with counted_lines() as lines:
        report = verify(zip_file(tmp_path / "model.pt", TRICKS[kind]), Level.CONTENT)
    assert lines() < MOST_LINES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    assert (report.verdict is Verdict.PROVEN) == (kind == "memo_bomb")  # harmless: nothing is allocated


def test_bytes_after_the_pickle_are_a_finding(tmp_path: Path) -> None:
    report = verify(zip_file(tmp_path / "model.pt", TRICKS["second_stop"]), Level.STRUCTURE)
    assert report.verdict is not Verdict.PROVEN


ARCHIVES = {
    "second_pickle": {"evil/data.pkl": call("posix", "system", "x")},
    "nested_archive": {"data/inner.zip": b"PK\3\4"},
    "parent": {"../../evil.py": b"x"},
    "code": {"code/__torch__.py": b"x"},
    "unused_storage": {"data/0": b"hidden"},
}


@pytest.mark.parametrize("kind", sorted(ARCHIVES))
def test_archives_with_members_foreign_to_torch_are_not_proven(tmp_path: Path, kind: str) -> None:
    report = verify(zip_file(tmp_path / "model.pt", pickle.dumps({}, 2), ARCHIVES[kind]), Level.CONTENT)
    assert report.verdict is not Verdict.PROVEN
    assert not (tmp_path.parent / "evil.py").exists()


def good_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in (("data.pkl", pickle.dumps({"step": 1}, 2)), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", data)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_member_names_are_reported(tmp_path: Path, wording: Wording) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as out:
        out.writestr("archive/data.pkl", pickle.dumps({}, 2))
        out.writestr("archive/data.pkl", call("posix", "system", "x"))
    wording(seen(verify(tmp_path / "a.pt", Level.STRUCTURE)), "archive/data.pkl")


@pytest.mark.parametrize("where", ["before", "after", "comment"])
def test_bytes_outside_the_archive_are_not_proven(tmp_path: Path, where: str) -> None:
    data = good_zip()
    assert verify(plain_file(tmp_path / "good.pt", data), Level.CONTENT).verdict is Verdict.PROVEN
    if where == "before":
        data = b"PK" + b"x" * 70_000 + data
    elif where == "after":
        data += b"\0" * 100
    else:
        data = data[:-2] + b"\5\0hello"
    # A comment contradicts nothing, but a reader may start its search for the directory inside it.
    verdict = Verdict.UNKNOWN if where == "comment" else Verdict.REFUTED
    assert verify(plain_file(tmp_path / "a.pt", data), Level.STRUCTURE).verdict is verdict


def test_a_zip_bomb_is_refused_without_unpacking(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", pickle.dumps({}, 2))
        out.writestr("archive/data/0", b"\0" * (100 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = verify(tmp_path / "a.pt", Level.CONTENT)
    assert report.verdict is not Verdict.PROVEN
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_small_file_claiming_exabytes_is_refuted(tmp_path: Path, wording: Wording) -> None:
    path = plain_file(
        tmp_path / "a.safetensors", struct.pack("<Q", 8 << 60 if (8 << 60) < 1 << 64 else 1 << 63) + b"{}"
    )
    report = verify(path, Level.STRUCTURE)
    assert report.causes == (Cause.DAMAGE,)
    wording(seen(report), f"{1 << 63:,}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 61], "data_offsets": [0, 1 << 63]}}).encode()
    path = plain_file(tmp_path / "b.safetensors", struct.pack("<Q", len(header)) + header)
    assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED


def test_a_huge_index_gets_a_short_report(tmp_path: Path, wording: Wording) -> None:
    table = {f"layers.{i}.w": f"model-{i % 100 + 1:05}-of-00100.safetensors" for i in range(100_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    report = verify(tmp_path, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    assert len(" ".join(report.problems)) < 1000
    wording("\n".join(report.problems), " 100 ")


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 100_000, b'{"a": 1', b"\xff\xfe"])
def test_hostile_json_is_refuted_with_one_problem(tmp_path: Path, data: bytes) -> None:
    report = verify(plain_file(tmp_path / "config.json", data), Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    assert len(report.files[0].problems) == 1


@pytest.mark.parametrize("data", [b"[" + b"[]," * 3_000_000 + b"0]", b"9" * 5000])
def test_memory_hungry_json_uses_little_memory(tmp_path: Path, data: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert verify(plain_file(tmp_path / "config.json", data), Level.STRUCTURE).verdict is not Verdict.PROVEN
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "config.json", "model.bin", "model.ckpt"])
def test_lfs_pointers_and_empty_files_are_damage(tmp_path: Path, name: str, wording: Wording) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    for data in (pointer, b""):
        report = verify(plain_file(tmp_path / name, data), Level.STRUCTURE)
        assert report.causes == (Cause.DAMAGE,)
        wording(seen(report))


def test_names_of_files_and_tensors_cannot_write_to_a_terminal(tmp_path: Path) -> None:
    header = json.dumps({"\x1b[2J" + "w" * 9000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}).encode()
    report = verify(plain_file(tmp_path / "a.safetensors", struct.pack("<Q", len(header)) + header + b"\0" * 8))
    assert "\x1b" not in seen(report)
    assert len(seen(report)) < 500


def test_a_deeply_nested_folder_is_unknown(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(60):
        deep /= "d"
        os.mkdir(deep)
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.UNKNOWN


# ----------------------------------------------------------------------------------------- malformed content in layouts

TENSOR = struct.pack("<Q", 56) + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(56) + bytes(4)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("x", {"_METADATA": b'{"tree_metadata": 5}'}),
        ("x", {"_METADATA": b'{"tree_metadata": [], "use_ocdbt": {}}', "_CHECKPOINT_METADATA": b"[]"}),
        ("checkpoint-5", {"trainer_state.json": b'{"global_step": 5, "epoch": 1' + b"0" * 400 + b"}"}),
        ("x", {"adapter_config.json": b'{"peft_type": "LORA", "r": 1, "target_modules": [[]]}'}),
    ],
)
def test_malformed_layout_files_are_not_proven(tmp_path: Path, name: str, files: dict[str, bytes]) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for file, content in {"adapter_model.safetensors": TENSOR, **files}.items():
        (folder / file).write_bytes(content)
    report = verify(tmp_path, Level.CONTENT)
    assert report.verdict is not Verdict.PROVEN


def test_an_adapter_with_scalar_tensors_contradicts_its_base(tmp_path: Path, wording: Wording) -> None:
    table = {f"m.lora_{x}.weight": {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i, x in enumerate("AB")}
    base = {"m.weight": {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}}
    for folder, head, size in (("a", table, 2), ("b", base, 1)):
        (tmp_path / folder).mkdir()
        raw = json.dumps(head).encode()
        data = struct.pack("<Q", len(raw)) + raw + bytes(size)
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(data)
        (tmp_path / folder / "adapter_config.json").write_text("{}")
    report = verify(tmp_path / "a", Level.CONTENT, against=tmp_path / "b")
    assert report.verdict is Verdict.REFUTED and report.causes == (Cause.CONTRADICTION,)
    wording("\n".join(report.reasons))


def test_linked_small_files_in_a_hub_cache_are_read(tmp_path: Path, wording: Wording) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/r"
    (snapshot / "global_step1").mkdir(parents=True)
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    listing = {"files": [{"path": "global_step1/w.safetensors", "size": len(TENSOR)}]}
    files = {
        "latest": b"global_step1",
        "gpuwarden-manifest.json": json.dumps(listing).encode(),
        "global_step1/w.safetensors": TENSOR,
    }
    for number, (name, content) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(blobs / str(number))
    report = verify(snapshot, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, report.reasons
    (blobs / "0").write_bytes(b"global_step2")
    wording("\n".join(verify(snapshot, Level.CONTENT).reasons), "global_step2")


def test_expected_digests_do_not_apply_to_the_compared_checkpoint(tmp_path: Path, wording: Wording) -> None:
    for step, value in ((1, 1), (2, 2)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(TENSOR[:-1] + bytes([value]))
        (folder / "notes.txt").write_text("x" * step)
    sha = hashlib.sha256((tmp_path / "checkpoint-2/model.safetensors").read_bytes()).hexdigest()
    expected = {"model.safetensors": Expected(len(TENSOR), {"sha256": sha}), "notes.txt": Expected(2, {})}
    (tmp_path / "checkpoint-1/model.safetensors").write_bytes(_longer())
    report = verify(tmp_path / "checkpoint-2", Level.CONTENT, expected=expected, against=tmp_path / "checkpoint-1")
    assert report.causes == (Cause.CONTRADICTION,)
    wording("\n".join(report.reasons), "checkpoint-1")


def _longer() -> bytes:
    return struct.pack("<Q", 56) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(56) + bytes(8)


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"NaN\n" * 500_000, b"[" + b"[]," * 2_200_000 + b"1]\n"])
def test_json_lines_use_bounded_memory(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "m.jsonl").write_bytes(text)
    tracemalloc.start()
    try:
        verify(tmp_path, Level.STRUCTURE)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_reader_that_needs_the_whole_file_stops_at_the_budget(tmp_path: Path, wording: Wording) -> None:
    """A picture with a terabyte of zeros takes no disk space, but takes an hour to read."""
    with (tmp_path / "a.png").open("wb") as out:
        out.write(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(13))
        out.write(struct.pack(">I", zlib.crc32(b"IHDR" + bytes(13))) + struct.pack(">I", 1 << 31))
        out.truncate(1 << 40)
    report = verify(tmp_path, Level.STRUCTURE, budget=Budget(60, 100 << 20))
    assert report.causes == (Cause.LIMIT,)
    wording("\n".join(report.reasons))


def test_an_unreadable_link_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    """For example /proc/1/cwd, for any user but root."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    follow = os.path.realpath

    def refuse(path: Any, **more: Any) -> str:
        if str(path).endswith("/link"):
            raise PermissionError(13, "Permission denied", path)
        return follow(path, **more)

    monkeypatch.setattr(os.path, "realpath", refuse)
    report = verify(tmp_path, Level.CONTENT)
    assert report.verdict is Verdict.UNKNOWN
    wording(seen(report), "Permission denied")
