"""A command that finds a Python on a machine that hasn't been probed before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract_backend import ended, shell
from gpuwarden.backends.base import artifacts
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NotSupported
from gpuwarden.core.models import Handle, Place
from gpuwarden.remote.host.any_python import ANY_PYTHON, NO_PYTHON, python_command
from gpuwarden.remote.ssh.session import Session
from gpuwarden.remote.transfer.receive import receive
from gpuwarden.remote.transfer.upload import push
from ssh_kit import machine
from sshd import Sshd
from wording import Wording

pytestmark = pytest.mark.anyio
SHOW = "import sys; print(sys.version_info >= (3, 8), sys.argv[1:], sys.stdin.read())"


def fake(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def start(path: Path, source: str = SHOW, home: Path = Path("/nowhere")) -> subprocess.CompletedProcess[str]:
    """Run the command with only the programs in `path`, and none in the usual folders."""
    for tool in ("sh", "tr", "sed"):
        if not (path / tool).exists():
            (path / tool).symlink_to(str(shutil.which(tool)))
    words = python_command(ANY_PYTHON, source, "a b", "$(c)")
    words[2] = words[2].replace("/usr/", "/none/").replace("/opt/", "/none/")
    env = {"PATH": str(path), "HOME": str(home)}
    return subprocess.run(words, env=env, input="in", capture_output=True, text=True, timeout=300)


# Pythons that are too old: one without `-I`, and one that supports it but fails the version check.
PYTHON_2 = "echo 'Unknown option: -I' >&2; exit 2"
PYTHON_36 = 'case "$4" in *"version_info < (3, 8)"*) exit 96;; esac; exit 0'


@pytest.mark.parametrize("old", [PYTHON_2, PYTHON_36, "exit 127"])
def test_an_old_python_is_skipped_and_arguments_arrive(tmp_path: Path, old: str) -> None:
    fake(tmp_path / "bin", "python3", old)
    fake(tmp_path / "bin", "python3.12", f'exec {sys.executable} "$@"')
    done = start(tmp_path / "bin")
    assert (done.returncode, done.stdout) == (0, "True ['a b', '$(c)'] in\n"), done.stderr


def test_a_home_folder_python_is_used_and_no_python_has_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert start(tmp_path / "bin").returncode == NO_PYTHON
    (tmp_path / ".local").mkdir()
    fake(tmp_path / ".local" / "bin", "python3", f'exec {sys.executable} "$@"')
    assert start(tmp_path / "bin", home=tmp_path).stdout.startswith("True")


@pytest.mark.parametrize("code", [0, 1, 3, 97])
def test_the_command_returns_the_programs_exit_code(tmp_path: Path, code: int) -> None:
    fake(tmp_path / "bin", "python3", f'exec {sys.executable} "$@"')
    assert start(tmp_path / "bin", f"import sys; sys.exit({code})").returncode == code


async def test_a_push_to_a_machine_without_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.remote.host.any_python._START", f"exit {NO_PYTHON}")
    server = Sshd(tmp_path / "s").start()
    ssh = machine(server)
    try:
        (tmp_path / "f").write_bytes(b"content")
        with pytest.raises(NotSupported):
            await push(ssh, {"a/f": tmp_path / "f"}, str(tmp_path / "far"))
        assert not (tmp_path / "far").exists()
    finally:
        await ssh.aclose()
        server.stop()


async def finished(backend: SshBackend, tmp_path: Path, text: str) -> Handle:
    place = Place(platform="ssh", host="box", run_root=str(tmp_path / "runs"))
    handle = await backend.submit(shell(text, outputs=["o"]), place, "t-one", secrets={})
    await ended(backend, handle)
    await backend.aclose()
    return handle


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that are started on machines."""
    started: list[list[str]] = []
    plain = Session.start

    def counted(self: Session, stdin: bytes | None) -> None:
        started.append(list(self.argv))
        plain(self, stdin)

    monkeypatch.setattr(Session, "start", counted)
    return started


@pytest.mark.slow
async def test_one_command_fetches_manifest_and_small_files(
    sshd: Sshd, tmp_path: Path, commands: list[list[str]]
) -> None:
    backend = SshBackend(SystemClock(), config=sshd.config)
    text = "mkdir -p o/d; for i in $(seq 300); do echo $i > o/d/$i; done; : > o/empty; ln -s /etc/passwd o/l"
    handle = await finished(backend, tmp_path, text + "; printf x > 'o/a b'; head -c 3000000 /dev/urandom > o/large")
    commands.clear()
    try:
        async with artifacts(backend, handle, ["o", "gone"], tmp_path / "here") as (listed, source):
            assert len(listed.files) == 303 and listed.missing == ("gone",)
            got = await receive(source, listed, tmp_path / "here")
        assert got.complete and got.sealed(listed).files[0].sha256
        assert [w for argv in commands for w in argv if w in {"fetch", "bundle", "list", "read"}] == ["fetch", "read"]
        for file in got.files:
            assert Path(file.local).read_bytes() == (Path(handle.run_dir) / "work" / file.path).read_bytes()
        commands.clear()
        async with artifacts(backend, handle, ["o"], tmp_path / "here") as (listed, source):
            again = await receive(source, listed, tmp_path / "here")
        assert (again.bytes_sent, again.complete) == (0, True)
        assert not [argv for argv in commands if "fetch" in argv], "nothing is sent unasked to where files are"
    finally:
        await backend.aclose()


@pytest.mark.slow
async def test_a_file_changed_after_its_manifest_is_a_problem(sshd: Sshd, tmp_path: Path) -> None:
    backend = SshBackend(SystemClock(), config=sshd.config)
    handle = await finished(backend, tmp_path, "mkdir o; for i in $(seq 40); do echo $i > o/$i; done")
    work = Path(handle.run_dir) / "work"
    try:
        async with artifacts(backend, handle, ["o"], tmp_path / "here") as (listed, source):
            row = next(a for a in listed.files if a.path == "o/7")
            altered = row.model_copy(update={"mtime_ns": row.mtime_ns - 1, "ctime_ns": row.ctime_ns - 1})
            files = tuple(altered if a is row else a for a in listed.files)
            got = await receive(source, listed.model_copy(update={"files": files}), tmp_path / "here")
        assert [p.path for p in got.problems] == ["o/7"] and len(got.files) == 39
        assert not (tmp_path / "here/o/7").exists() and (work / "o/7").exists()
    finally:
        await backend.aclose()


@pytest.mark.slow
async def test_an_unread_fetch_leaves_no_process(sshd: Sshd, tmp_path: Path) -> None:
    backend = SshBackend(SystemClock(), config=sshd.config)
    text = "mkdir o; for i in $(seq 60); do head -c 500000 /dev/urandom > o/$i; done"
    handle = await finished(backend, tmp_path, text)
    try:
        async with artifacts(backend, handle, ["o"], tmp_path / "here") as (listed, _):
            assert len(listed.files) == 60
        found = subprocess.run(["pgrep", "-f", f"fetch {handle.run_dir}"], capture_output=True, timeout=300)
        assert found.returncode == 1, found.stdout
    finally:
        await backend.aclose()


@pytest.mark.slow
async def test_a_missing_python_is_not_reported_as_a_lost_file(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    backend = SshBackend(SystemClock(), config=sshd.config)
    handle = await finished(backend, tmp_path, "mkdir o")
    monkeypatch.setattr("gpuwarden.remote.host.any_python._START", f"exit {NO_PYTHON}")
    try:
        with pytest.raises(NotSupported) as refused:
            await backend.list_files(handle, ["o"])
        wording(refused)
    finally:
        await backend.aclose()
