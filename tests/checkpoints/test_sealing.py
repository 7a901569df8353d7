"""Digests taken right after a save by the sealer that the runner starts, kept in a log, and read by the manifest."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuwarden.checkpoints import archive
from gpuwarden.checkpoints.sealing import seal_log
from gpuwarden.checkpoints.sealing.seal import Sealer
from gpuwarden.remote.launch import checker
from gpuwarden.remote.runner.inventory import processes
from gpuwarden.remote.runner.observe import observe
from gpuwarden.remote.runner.seals import find_archive, seals
from gpuwarden.remote.runner.status import FINAL
from runner_kit import runner_file
from waiting import eventually
from wording import Wording

KEY = "5e" * 32
SAVE = """
import json, os, struct, sys, time
def save(step):
    draft, final = f"out/tmp-checkpoint-{step}", f"out/checkpoint-{step}"
    os.makedirs(draft)
    head = json.dumps({"w": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}).encode()
    head += b" " * (-len(head) % 8)
    with open(draft + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + struct.pack("<4096f", *range(4096)))
    json.dump({"global_step": step}, open(draft + "/trainer_state.json", "w"))
    os.rename(draft, final)
"""


def weights(path: Path, fill: float = 1.0) -> Path:
    head = json.dumps({"w": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}).encode()
    head += b" " * (-len(head) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(head)) + head + struct.pack("<1024f", *[fill] * 1024))
    return path


def call(verb: str, folder: Path, request: object) -> list[dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", runner_file(), verb, str(folder)]
    done = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True, timeout=300)
    assert not done.stderr, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def start(folder: Path, text: str, **more: Any) -> None:
    name, content = checker()
    (folder / name).write_bytes(content)
    fast = {"seal_after_s": 0.01, "seal_quiet_s": 0.2, "seal_every_s": 0.1, "archive": name, "outputs": ["out"]}
    spec = {"argv": [sys.executable, "-c", SAVE + text], "env": {}, **fast, **more}
    order = {"spec": spec, "secrets": {"GPUWARDEN_SEAL_KEY": KEY}, "token": "t", "attempt": 1}
    (answer,) = call("start", folder, order)
    assert answer["ok"], answer


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in call("manifest", folder, {"paths": ["out"]}) if "path" in row}


def over(folder: Path) -> bool:
    seen = observe(str(folder))
    return seen["state"] in FINAL and seen["alive"] is False


def sealers(folder: Path) -> list[int]:
    archive = f"{folder}/gpuwarden-checkpoints"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if archive in " ".join(p.info["cmdline"] or ())]


def started_and_sealed(folder: Path) -> Path:
    """Start a job that saves once, then stop it and its sealer, which would otherwise seal a changed file again."""
    start(folder, "save(1); time.sleep(600)")
    place = folder / "work/out/checkpoint-1/model.safetensors"
    eventually(lambda: str(place) in seal_log.read(folder / "seals.jsonl"))
    call("stop", folder, {"grace_s": 0})
    eventually(lambda: not sealers(folder))
    return place


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = Path(os.path.realpath(tmp_path)) / "job"
    path.mkdir()
    yield path
    call("stop", path, {"grace_s": 0})


# ----------------------------------------------------------------------------------------------------- in the runner


@pytest.mark.prove
def test_a_running_jobs_checkpoint_is_sealed_and_listed(folder: Path) -> None:
    start(folder, "save(1); time.sleep(600)")
    place = folder / "work/out/checkpoint-1/model.safetensors"
    rows = eventually(lambda: seal_log.read(folder / "seals.jsonl"), good=lambda rows: str(place) in rows)
    known = listing(folder)
    row = known["out/checkpoint-1/model.safetensors"]
    assert row["seal"] == {k: rows[str(place)][k] for k in ("sha256", "sealed_at", "mac")}
    assert row["sha256"] == row["seal"]["sha256"], "what is there now is what was saved"
    assert seal_log.made_with(KEY.encode(), rows[str(place)])
    assert set(known) == {"out/checkpoint-1/model.safetensors", "out/checkpoint-1/trainer_state.json"}


@pytest.mark.prove
def test_a_rewritten_file_loses_its_seal(folder: Path) -> None:
    place = started_and_sealed(folder)
    before, times = listing(folder)["out/checkpoint-1/model.safetensors"], place.stat()
    data = bytearray(place.read_bytes())
    data[-2] ^= 4
    place.write_bytes(data)
    os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))  # no program can restore the status change time
    row = listing(folder)["out/checkpoint-1/model.safetensors"]
    assert "seal" in before and "seal" not in row and row["sha256"] != before["sha256"]


@pytest.mark.prove
def test_silent_disk_corruption_is_detected(folder: Path, wording: Wording) -> None:
    place = started_and_sealed(folder)
    sealed = seal_log.read(folder / "seals.jsonl")[str(place)]
    data = bytearray(place.read_bytes())
    data[-2] ^= 4
    place.write_bytes(data)
    # No program can restore the status change time, so the log records the new one.
    size, mtime, ctime = seal_log.stamp_of(str(place)) or (0, 0, 0)
    same = {**sealed, "size": size, "mtime_ns": mtime, "ctime_ns": ctime}
    seal_log.add(folder / "seals.jsonl", [{**same, "mac": seal_log.mac(KEY.encode(), same)}])
    row = listing(folder)["out/checkpoint-1/model.safetensors"]
    assert row["seal"]["sha256"] == sealed["sha256"] != row["sha256"], "what was saved, and what is there now"
    *_, found, last = call("examine", folder, {"paths": ["out"], "archive": checker()[0], "seconds": 30})
    assert last["ok"]
    bad = next(f for f in found["found"]["files"] if f["path"].endswith("model.safetensors"))
    wording(bad["problems"][0])


@pytest.mark.slow
def test_the_last_save_is_sealed_at_the_end(folder: Path) -> None:
    start(folder, "time.sleep(1); save(2)", seal_quiet_s=3600)
    eventually(lambda: over(folder))
    rows = eventually(lambda: seal_log.read(folder / "seals.jsonl"))
    assert str(folder / "work/out/checkpoint-2/model.safetensors") in rows


@pytest.mark.slow
def test_sealing_does_not_disturb_checkpoint_rotation(folder: Path) -> None:
    rotate = (
        "import shutil\nfor step in range(1, 60):\n"
        "    save(step); time.sleep(0.02)\n"
        "    if step > 2: shutil.rmtree(f'out/checkpoint-{step - 2}')\n"
    )
    start(folder, rotate, seal_quiet_s=0.01, seal_every_s=0.01)
    eventually(lambda: over(folder), within=60)
    assert observe(str(folder))["state"] == "succeeded"
    assert {p.name for p in (folder / "work/out").iterdir()} == {"checkpoint-58", "checkpoint-59"}


NO_ARCHIVE = "gpuwarden-checkpoints-0123456789abcdef.pyz"


@pytest.mark.parametrize("pyz", ["", "../evil.pyz", NO_ARCHIVE, None, 7])
def test_find_archive_rejects_other_names_and_digests(tmp_path: Path, pyz: object) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "evil.pyz").touch()
    assert find_archive(str(tmp_path / "run"), pyz) == ""
    (tmp_path / "run" / NO_ARCHIVE).write_bytes(checker()[1])
    assert find_archive(str(tmp_path / "run"), pyz) == "", "its digest is another"


@pytest.mark.slow
def test_a_job_without_an_archive_succeeds_unsealed(folder: Path) -> None:
    start(folder, "time.sleep(0.6); save(1)", archive=NO_ARCHIVE)
    eventually(lambda: over(folder))
    assert observe(str(folder))["state"] == "succeeded"
    assert not (folder / "seals.jsonl").exists()
    assert "seal" not in listing(folder)["out/checkpoint-1/model.safetensors"]


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_sealer_does_not_outlive_a_killed_supervisor(folder: Path) -> None:
    start(folder, "save(1); time.sleep(600)")
    eventually(lambda: seal_log.read(folder / "seals.jsonl"))
    (sealer,) = sealers(folder)
    assert not [text for text in processes(None) if text.startswith(f"pid {sealer}:")]
    os.kill(observe(str(folder))["pid"], signal.SIGKILL)
    eventually(lambda: not sealers(folder))


# ------------------------------------------------------------------------------------------------------ the seal log


KILLS = """
import os, signal, sys, time
path, out, log, *moments = sys.argv[1:]
sys.path.insert(0, path)
from gpuwarden.checkpoints import archive
from gpuwarden.checkpoints.plugins import FORMATS, LAYOUTS
from gpuwarden.checkpoints.sealing import seal, seal_log
FORMATS.usable(), LAYOUTS.usable()
for moment in map(float, moments):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        archive.main(["seal", out, "--log", log, "--quiet", "0", "--every", "0.01"])
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(*(place for place, row in seal_log.read(log).items() if seal_log.stamp(row) != seal_log.stamp_of(place)))
"""


@pytest.mark.prove
def test_the_seal_log_survives_kills_at_random_moments(tmp_path: Path) -> None:
    """A killed sealer leaves complete lines and at most one truncated line; the next sealer continues from there.

    The sealers are forks of a process that has imported the archive, since the import takes longer than sealing.
    """
    dice, (name, content) = random.Random(1), checker()
    (tmp_path / name).write_bytes(content)
    for step in range(12):
        weights(tmp_path / f"out/checkpoint-{step}/model.safetensors", step)
    places = list(map(str, (tmp_path / name, tmp_path / "out", tmp_path / "log")))
    moments = [str(dice.uniform(0, 0.1)) for _ in range(12)]  # the kill has to come at a random moment
    argv = [sys.executable, "-I", "-S"]
    done = subprocess.run([*argv, "-c", KILLS, *places, *moments], capture_output=True, timeout=300)
    assert (done.returncode, done.stdout.split(b"\n")) == (0, [b""] * 13), done.stderr.decode()
    argv += [places[0], "seal", places[1], "--quiet", "0"]
    subprocess.run([*argv, "--log", places[2], "--once"], check=True, timeout=300, capture_output=True)
    rows = seal_log.read(tmp_path / "log")
    assert len(rows) == 12
    assert seals(str(tmp_path)) == {}
    (tmp_path / "log").rename(tmp_path / "seals.jsonl")
    assert seals(str(tmp_path)).keys() == rows.keys()


def test_cut_and_malformed_log_lines_are_skipped(tmp_path: Path) -> None:
    row = {"path": "/a", "size": 1, "mtime_ns": 2, "ctime_ns": 3, "sha256": "0" * 64, "sealed_at": 1.0}
    (tmp_path / "seals.jsonl").write_bytes(b'{"path": "/cut", "size": 1, "mtime')
    seal_log.add(tmp_path / "seals.jsonl", [row])
    with (tmp_path / "seals.jsonl").open("ab") as out:
        out.write(b"[" * 100_000 + b"\n{}\n7\n\xff\xfe\n" + json.dumps({**row, "path": "/b", "sha256": "x"}).encode())
    assert seal_log.read(tmp_path / "seals.jsonl").keys() == {"/a"}
    assert seals(str(tmp_path)).keys() == {"/a"}


def test_a_replayed_older_line_is_ignored(tmp_path: Path) -> None:
    lines = [
        {"path": "/a", "size": 1, "mtime_ns": 2, "ctime_ns": 3, "sha256": digit * 64, "sealed_at": at}
        for digit, at in (("a", 1.0), ("b", 2.0))
    ]
    signed = [{**line, "mac": seal_log.mac(KEY.encode(), line)} for line in lines]
    seal_log.add(tmp_path / "seals.jsonl", [*signed, signed[0]])
    assert seal_log.read(tmp_path / "seals.jsonl", KEY.encode())["/a"]["sealed_at"] == 2.0
    assert seals(str(tmp_path))["/a"]["sealed_at"] == 2.0


def test_a_torn_checkpoint_is_examined_once_and_not_sealed(tmp_path: Path) -> None:
    path = weights(tmp_path / "out/checkpoint-1/model.safetensors")
    os.truncate(path, 1000)
    sealer = Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log")
    assert sealer.look() == [] and sealer.look() == []
    weights(path)
    assert sealer.look() == ["checkpoint-1"]
    assert Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log").look() == [], "it is in the book already"
    shutil.rmtree(path.parent)
    assert sealer.look() == []


def test_a_file_of_an_unsupported_format_is_sealed_with_its_checkpoint(tmp_path: Path) -> None:
    path = weights(tmp_path / "out/checkpoint-1/model.safetensors")
    note = path.with_name("notes.xyz")
    note.write_bytes(b"\x00\x01")
    sealer = Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log", key=KEY.encode())
    assert sealer.look() == ["checkpoint-1"]
    assert str(note) in seal_log.read(tmp_path / "log", KEY.encode())


def test_the_archive_is_small_and_reproducible() -> None:
    assert archive.build() == checker()[1]
    assert len(checker()[1]) < 200_000


FORGED: list[dict[str, Any]] = [
    {"sealed_at": float("nan")},
    {"sealed_at": "today"},
    {"sealed_at": 10**400},
    {"size": float("inf")},
    {"size": [1]},
    {"sha256": None},
    {"sha256": 7},
    {"mac": "x" * 64},
    {"mac": ["0"]},
    {"mac": "0" * (1 << 20)},
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_line_hides_no_other_line(tmp_path: Path, forged: dict[str, Any]) -> None:
    """The archive and the runner read the log with different functions."""
    row = {"size": 1, "mtime_ns": 2, "ctime_ns": 3, "sha256": "0" * 64, "sealed_at": 1.0}
    signed = {**row, "mac": seal_log.mac(KEY.encode(), row)}
    lines = [{"path": "/a", **signed}, {"path": "/f", **signed, **forged}, {"path": "/b", **signed}]
    seal_log.add(tmp_path / "seals.jsonl", lines)
    assert seal_log.read(tmp_path / "seals.jsonl", KEY.encode()).keys() == {"/a", "/b"}
    assert seals(str(tmp_path)).keys() - {"/f"} == {"/a", "/b"}


@pytest.mark.prove
def test_forged_lines_stop_neither_manifest_nor_examination(folder: Path) -> None:
    """The job can write to the log. Invalid lines are skipped, and the bytes are hashed."""
    start(folder, "save(1); time.sleep(600)")
    rows = eventually(lambda: seal_log.read(folder / "seals.jsonl"))
    place = str(folder / "work/out/checkpoint-1/model.safetensors")
    with (folder / "seals.jsonl").open("a") as out:
        out.writelines("\n" + json.dumps({**rows[place], **forged}) + "\n" for forged in FORGED)
    assert listing(folder)["out/checkpoint-1/model.safetensors"]["sha256"] == rows[place]["sha256"]
    *_, last = call("examine", folder, {"paths": ["out"], "archive": checker()[0], "seconds": 30})
    assert last["ok"], last


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prctl")
def test_the_key_is_in_no_file_argument_or_environment(folder: Path) -> None:
    start(folder, "save(1); print(dict(os.environ)); time.sleep(60)")
    eventually(lambda: seal_log.read(folder / "seals.jsonl", KEY.encode()))
    for path in (p for p in folder.rglob("*") if p.is_file()):
        assert KEY.encode() not in path.read_bytes(), path
    supervisor = int(observe(str(folder))["pid"])
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    mine = [pid for pid in (supervisor, *map(int, children)) if b"gpuwarden" in command_of(pid) or pid == supervisor]
    assert len(mine) == 2, "supervisor and sealer"
    for pid in mine:
        assert KEY.encode() not in command_of(pid) + Path(f"/proc/{pid}/environ").read_bytes()


PEEK = """
import ctypes, os, sys, time
sys.path.insert(0, sys.argv[1])
from gpuwarden.checkpoints.sealing import seal
from gpuwarden.remote.runner import process

def same_user():
    if os.geteuid() == 0:
        os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after an exec

def readable(hide):
    held, told = os.pipe(), os.pipe()
    holder = os.fork()
    if not holder:
        same_user(), hide()
        os.write(told[1], b".")
        os.read(held[0], 1)
        os._exit(0)
    os.read(told[0], 1)
    reader = os.fork()
    if not reader:
        same_user()
        try:
            os.open(f"/proc/{holder}/mem", os.O_RDONLY)
        except OSError:
            os._exit(1)
        os._exit(0)
    code = os.waitpid(reader, 0)[1]
    os.write(held[1], b".")
    os.waitpid(holder, 0)
    return code == 0

print(*map(readable, (lambda: None, seal.hide_memory, process.hide_memory)))
"""


OVERWRITTEN = """
import sys
sys.path.insert(0, sys.argv[1])
from gpuwarden.checkpoints import archive
from gpuwarden.checkpoints.sealing import seal
seal.hide_memory = lambda: open(sys.argv[1], "wb").write(bytes(200_000))
archive.main(["seal", sys.argv[2], "--log", sys.argv[3], "--quiet", "0", "--once", "--keyed"])
"""


@pytest.mark.slow
def test_a_sealer_with_the_key_reads_nothing_from_its_archive(tmp_path: Path) -> None:
    """Otherwise, a job that overwrites the archive could get any digest signed with the key."""
    path = weights(tmp_path / "out/checkpoint-1/model.safetensors")
    name, content = checker()
    (tmp_path / name).write_bytes(content)
    argv = [sys.executable, "-I", "-S", "-c", OVERWRITTEN, *map(str, (tmp_path / name, path, tmp_path / "log"))]
    done = subprocess.run(argv, input=KEY.encode() + b"\n", capture_output=True, timeout=300)
    assert not done.stderr, done.stderr.decode()
    assert (tmp_path / name).read_bytes() == bytes(200_000)
    assert seal_log.read(tmp_path / "log", KEY.encode()).keys() == {str(path)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prctl")
def test_a_process_of_the_same_user_cannot_read_the_key_from_memory() -> None:
    server = Path(str(seal_log.__file__)).parents[3]
    done = subprocess.run([sys.executable, "-c", PEEK, str(server)], capture_output=True, text=True, timeout=300)
    open_one, *hidden = done.stdout.split()
    if open_one == "False":
        pytest.skip("this kernel hides the memory of every process already")
    assert hidden == ["False", "False"], done.stderr


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_sealer_ignores_lines_that_it_did_not_sign(tmp_path: Path) -> None:
    """A job that writes a digest of its choice to the log doesn't keep the sealer from its work."""
    path = weights(tmp_path / "out/checkpoint-1/model.safetensors")
    size, mtime, ctime = seal_log.stamp_of(str(path)) or (0, 0, 0)
    forged = {"path": str(path), "size": size, "mtime_ns": mtime, "ctime_ns": ctime, "sha256": "0" * 64}
    for more in ({}, {"mac": ""}, {"mac": "\u00e9"}, {"mac": seal_log.mac(b"guess", {**forged, "sealed_at": 1.0})}):
        seal_log.add(tmp_path / "log", [{**forged, "sealed_at": 1.0, **more}])
    sealer = Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log", key=KEY.encode())
    assert sealer.look() == ["checkpoint-1"]
    row = seal_log.read(tmp_path / "log", KEY.encode())[str(path)]
    assert row["sha256"] != "0" * 64 and seal_log.made_with(KEY.encode(), row)
    again = Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log", key=KEY.encode())
    assert again.look() == [], "it knows its own line"


@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_log_replaced_by_a_pipe_or_link_never_blocks(tmp_path: Path, what: str) -> None:
    target = tmp_path / "elsewhere"
    target.touch()
    if what == "pipe":
        os.mkfifo(tmp_path / "log")
    else:
        (tmp_path / "log").symlink_to(target)
    weights(tmp_path / "out/checkpoint-1/model.safetensors")
    with no_longer_than(20):
        assert seal_log.read(tmp_path / "log") == {}
        assert Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log").look() == []
    assert not target.stat().st_size


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Exit after `seconds`, since a call that waits for a pipe can't be interrupted any other way."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_mapped_file_that_changes_after_its_seal_loses_it(tmp_path: Path) -> None:
    """A page that is already dirty may change without a new timestamp; once it is flushed, the next write sets one."""
    path = weights(tmp_path / "out/checkpoint-1/model.safetensors")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] = 1
        assert Sealer(tmp_path / "out", quiet_s=0, log=tmp_path / "log").look() == ["checkpoint-1"]
        row = seal_log.read(tmp_path / "log")[str(path)]
        assert seal_log.stamp(row) == seal_log.stamp_of(str(path))
        time.sleep(0.02)  # kernel timestamps are coarse
        mapped[-1] = 2
        assert seal_log.stamp(row) != seal_log.stamp_of(str(path))


def test_runner_and_package_cut_files_into_the_same_parts() -> None:
    """The runner's modules are sent without the package, so they contain a copy of the rule, which must not differ."""
    package = Path(archive.__file__).parents[1]
    here, there = (package / p for p in ("checkpoints/sealing/parts.py", "remote/runner/parts.py"))
    rule = '`{}` has the same rule."""'
    ours = here.read_text("utf-8").replace(rule.format("remote/runner/parts.py"), "")
    assert ours == there.read_text("utf-8").replace(rule.format("checkpoints/sealing/parts.py"), "")
