"""The ssh backend against a real OpenSSH server: the contract, and the promises that only it makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from contract_backend import BackendContract, ended, shell
from gpuwarden.backends.base import source
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, NotSupported
from gpuwarden.core.models import Artifact, Handle, Place, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import Job
from gpuwarden.remote.host.host_info import parse_host_info
from gpuwarden.remote.ssh.host_keys import HostKeyChanged, fingerprint
from gpuwarden.remote.ssh.link import SESSIONS
from gpuwarden.remote.ssh.session import Session
from gpuwarden.remote.transfer.receive import receive
from sshd import Sshd, keygen
from waiting import eventually
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def backend(sshd: Sshd) -> Iterator[SshBackend]:
    ssh = SshBackend(SystemClock(), config=sshd.config)
    yield ssh
    anyio.run(ssh.aclose)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(platform="ssh", host="box", run_root=str(tmp_path / "runs"))


@pytest.mark.slow
class TestSsh(BackendContract):
    pass


@pytest.mark.slow
async def test_first_contact_reports_the_host_key_and_inspects_the_machine(
    backend: SshBackend, place: Place, sshd: Sshd, wording: Wording
) -> None:
    fresh = SshBackend(SystemClock(), config=sshd.config)
    findings = await fresh.check(place)
    assert findings[0].severity is Severity.INFO
    wording(findings[0].message, fingerprint(sshd.host_key))
    assert {"PF-GPU-001", "PF-HOST-003"} <= {f.rule for f in findings}
    pinned = place.model_copy(update={"host_key": sshd.host_key})
    wording((await fresh.check(pinned))[0].message, fingerprint(sshd.host_key))
    await fresh.aclose()


async def test_a_changed_host_key_is_an_error_and_sends_nothing(
    place: Place, sshd: Sshd, tmp_path: Path, wording: Wording
) -> None:
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    fresh = SshBackend(SystemClock(), config=sshd.config)
    changed = place.model_copy(update={"host_key": other})
    (finding,) = await fresh.check(changed)
    assert finding.severity is Severity.ERROR
    wording(finding.message, fingerprint(other), fingerprint(sshd.host_key))
    with pytest.raises(HostKeyChanged):
        await fresh.submit(shell("true"), changed, "t-evil", secrets={})
    assert not (tmp_path / "runs").exists()
    assert isinstance(await fresh.find(changed, "t-evil"), Unknown)
    await fresh.aclose()


async def test_a_machine_that_does_not_answer_is_unknown(sshd: Sshd, closed_port: int) -> None:
    fresh = SshBackend(SystemClock(), config=sshd.config)
    nowhere = Place(platform="ssh", host="127.0.0.1", port=closed_port, run_root="/tmp/x")
    (finding,) = await fresh.check(nowhere)
    assert finding.severity is Severity.UNKNOWN


async def test_the_handle_carries_the_pin(backend: SshBackend, place: Place, sshd: Sshd) -> None:
    handle = await backend.submit(shell("true"), place, "t-pin", secrets={})
    assert handle.place.host_key == sshd.host_key
    assert Handle.model_validate_json(handle.model_dump_json()) == handle


@pytest.mark.slow
async def test_many_jobs_are_polled_through_a_running_runner(
    backend: SshBackend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [await backend.submit(shell(f"exit {n}"), place, f"t-{n}", secrets={}) for n in range(5)]
    for handle in handles:
        await ended(backend, handle)
    started: list[object] = []
    plain = Session.start

    def counted(self: Session, stdin: bytes | None) -> None:
        started.append(self.argv)
        plain(self, stdin)

    monkeypatch.setattr(Session, "start", counted)
    for _ in range(3):
        assert len(await backend.poll(handles)) == 5
    assert not started
    await backend.aclose()
    assert len(await backend.poll(handles)) == 5
    assert [a for a in started if "serve" in a] and not [a for a in started if "poll" in a]


@pytest.mark.slow
async def test_a_poll_that_was_canceled_leaves_no_answer_for_the_next(backend: SshBackend, place: Place) -> None:
    one = await backend.submit(shell("exit 1"), place, "t-one", secrets={})
    two = await backend.submit(shell("exit 2"), place, "t-two", secrets={})
    for handle in (one, two):
        await ended(backend, handle)
    for n in range(6):
        with anyio.move_on_after(0.0004 * n):
            await backend.poll([one])
        assert (await backend.poll([two]))["t-two"].exit_code == 2


@pytest.mark.slow
async def test_a_killed_polling_runner_is_restarted(backend: SshBackend, place: Place) -> None:
    handle = await backend.submit(shell("exit 3"), place, "t-kill", secrets={})
    await ended(backend, handle)
    serving = f"{place.run_root}/.gpuwarden/runner.* serve"
    for _ in range(SESSIONS + 1):  # a killed session frees its slot
        subprocess.run(["pkill", "-f", serving], check=True, timeout=300)
        assert (await backend.poll([handle]))["t-kill"].exit_code == 3
        assert (await backend.poll([handle]))["t-kill"].exit_code == 3
    await backend.aclose()
    eventually(lambda: subprocess.run(["pgrep", "-f", serving], timeout=300).returncode == 1)


@pytest.mark.slow
async def test_a_runner_that_was_removed_is_shipped_again(backend: SshBackend, place: Place) -> None:
    handle = await backend.submit(shell("echo hi > out"), place, "t-again", secrets={})
    await ended(backend, handle)
    for file in (Path(place.run_root) / ".gpuwarden").glob("*.py"):
        file.unlink()
    assert (await backend.poll([handle]))["t-again"].state is Job.SUCCEEDED
    for file in (Path(place.run_root) / ".gpuwarden").glob("*.py"):
        file.unlink()
    assert b"".join([c async for c in backend.read(handle, Artifact(path="out", size=3))]) == b"hi\n"


@pytest.mark.slow
async def test_the_job_survives_a_lost_connection(backend: SshBackend, place: Place) -> None:
    handle = await backend.submit(shell("sleep 1; echo done"), place, "t-cut", secrets={})
    await backend.aclose()
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text == "done\n"


@pytest.mark.slow
async def test_a_secret_never_appears_in_a_command_line(backend: SshBackend, place: Place) -> None:
    spec = shell("sleep 1; ps -eo args | grep -c [h]unter2", secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "t-ps", secrets={"TOKEN": "hunter2-hunter2"})
    await ended(backend, handle)
    assert (await backend.logs(handle)).text == "0\n"


@pytest.mark.slow
async def test_many_files_are_received_without_links(backend: SshBackend, place: Place, tmp_path: Path) -> None:
    text = "mkdir o; for i in $(seq 500); do echo $i > o/f$i; done; head -c 3000000 /dev/urandom > o/big"
    text += "; ln -s /etc/passwd o/l"
    handle = await backend.submit(shell(text, outputs=["o"]), place, "t-many", secrets={})
    await ended(backend, handle)
    manifest = await backend.manifest(handle, ["o"])
    got = await receive(source(backend, handle), manifest, tmp_path / "here")
    assert got.complete and len(got.files) == 501
    assert (tmp_path / "here/o/f77").read_text() == "77\n"
    assert not (tmp_path / "here/o/l").exists()


def test_host_info_is_parsed() -> None:
    lines = [
        "Welcome",
        "home=/root",
        "path=/bin:/usr/bin",
        "first_path=/opt/conda/bin:/bin",
        "tool=uv /home/me/.local/bin/uv",
    ]
    host = parse_host_info([*lines, "python=3.6 0 /usr/bin/python3", "python=3.11 1 /opt/conda/bin/python", "python=x"])
    assert host.path == "/bin:/usr/bin:/opt/conda/bin"
    assert host.runner_python == host.job_python == "/opt/conda/bin/python"
    assert host.tools == {"uv": "/home/me/.local/bin/uv"}
    both = parse_host_info([*lines, "python=3.12 0 /usr/bin/python3", "python=3.10 1 /venv/bin/python"])
    assert (both.runner_python, both.job_python) == ("/usr/bin/python3", "/venv/bin/python")
    for pythons in ([], ["python=3.6 1 /usr/bin/python3"]):
        with pytest.raises(NotSupported, match=r"Python 3\.8"):
            _ = parse_host_info([*lines, *pythons]).runner_python
    with pytest.raises(BadReply):
        parse_host_info(["This account is not available"])
