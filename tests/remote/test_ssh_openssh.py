"""Features that only the system's `ssh` supports: agents, certificates, and jump hosts from a user's configuration."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, Unreachable
from gpuwarden.core.models import Place
from gpuwarden.core.rules import Severity
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.remote.ssh import openssh
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.host_keys import HostKeyChanged, HostKeyRevoked, HostKeyUnproven, fingerprint
from gpuwarden.remote.ssh.machine import Ssh
from gpuwarden.remote.ssh.openssh import ORPHAN_S, Master
from gpuwarden.remote.ssh.outcomes import NoShell
from real_parts import need
from ssh_kit import cut, machine
from sshd import Sshd, keygen
from waiting import eventually
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def has_client() -> None:
    need("an OpenSSH client, 8.5 or newer", openssh.usable() is not None)


def run(*argv: str, **options: object) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    return str(done.stdout)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """A real ssh-agent that is reachable only through the path of its socket."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    eventually(path.exists)
    yield path
    process.terminate()
    process.wait(60)


@pytest.fixture
def rewrite(sshd: Sshd, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the server's configuration with another identity line and more lines."""

    def make(identity: str, *more: str) -> Path:
        lines = [li for li in sshd.config.read_text().splitlines() if "IdentityFile" not in li]
        (tmp_path / "config").write_text("\n".join([*lines, f"  {identity}", *(f"  {m}" for m in more)]) + "\n")
        return tmp_path / "config"

    return make


def at(config: Path, **how: str) -> Ssh:
    return Ssh(resolve("box", config=config), config=config, **how)


async def works(config: Path) -> None:
    ssh = at(config)
    try:
        assert (await ssh.run(["echo", "in"])).out == b"in\n"
    finally:
        await ssh.aclose()


# -------------------------------------------------------------------------------------------------- keys and agents


@pytest.mark.usefixtures("client")
async def test_a_key_held_only_by_an_agent_logs_in(
    sshd: Sshd, agent: Path, rewrite: Callable[..., Path], tmp_path: Path, wording: Wording
) -> None:
    """As with 1Password and hardware agents: the public key is on disk, the private key behind IdentityAgent."""
    (tmp_path / "held.pub").write_text((sshd.folder / "clientkey.pub").read_text())
    config = rewrite(f"IdentityFile {tmp_path}/held.pub", f"IdentityAgent {agent}")
    with pytest.raises(AuthFailed) as refused:
        await at(config).open()
    wording(refused, f"{tmp_path}/held.pub", f"{getpass.getuser()}@127.0.0.1")
    run("ssh-add", "-q", str(sshd.folder / "clientkey"), env={**os.environ, "SSH_AUTH_SOCK": str(agent)})
    await works(config)


async def test_a_user_certificate_logs_in(
    client: str, rewrite: Callable[..., Path], tmp_path: Path, wording: Wording
) -> None:
    """The server trusts a certificate authority and no individual key."""
    for name in ("authority", "mine"):
        keygen(tmp_path / name)
    run("ssh-keygen", "-q", "-s", str(tmp_path / "authority"), "-I", "me", "-n", "trainer", str(tmp_path / "mine.pub"))
    (tmp_path / "principals").write_text("trainer\n")
    more = f"TrustedUserCAKeys {tmp_path}/authority.pub\nAuthorizedPrincipalsFile {tmp_path}/principals"
    server = Sshd(tmp_path / "s", more=more).start()
    try:
        (tmp_path / "elsewhere-cert.pub").write_text((tmp_path / "mine-cert.pub").read_text())
        (tmp_path / "mine-cert.pub").unlink()
        text = server.config.read_text().replace(f"{server.folder}/clientkey", f"{tmp_path}/mine")
        server.config.write_text(text)
        with pytest.raises(AuthFailed) as refused:
            await machine(server).open()
        wording(str(refused.value).partition(" (")[0], f"{getpass.getuser()}@127.0.0.1")
        server.config.write_text(f"{text}  CertificateFile {tmp_path}/elsewhere-cert.pub\n")
        if client == "openssh":
            await works(server.config)
        else:
            with pytest.raises(AuthFailed, match="CertificateFile") as refused:
                await machine(server).open()
            assert "KEY-cert.pub" in in_calls(refused.value.next_steps)
            (tmp_path / "elsewhere-cert.pub").rename(tmp_path / "mine-cert.pub")
            server.config.write_text(text)
            await works(server.config)
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("client")
async def test_identity_agent_none_uses_no_agent(
    sshd: Sshd, agent: Path, rewrite: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent at SSH_AUTH_SOCK has the key, but the user's configuration excludes the agent for this host."""
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    run("ssh-add", "-q", str(sshd.folder / "clientkey"))
    (tmp_path / "held.pub").write_text((sshd.folder / "clientkey.pub").read_text())
    for word in ("SSH_AUTH_SOCK", "$SSH_AUTH_SOCK"):
        await works(rewrite(f"IdentityFile {tmp_path}/held.pub", f"IdentityAgent {word}"))
    keygen(tmp_path / "other")
    for identity in (f"{tmp_path}/held.pub", f"{tmp_path}/other.pub"):  # no agent, then an agent without the key
        config = rewrite(f"IdentityFile {identity}", *(["IdentityAgent none"] if "held" in identity else []))
        with pytest.raises(AuthFailed):
            await at(config).open()


@pytest.mark.usefixtures("client")
async def test_a_login_without_key_or_agent_suggests_ssh_keygen(
    rewrite: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    config = rewrite(f"IdentityFile {tmp_path}/none", "IdentityAgent none")
    with pytest.raises(AuthFailed) as refused:
        await at(config).open()
    wording(refused, f"{getpass.getuser()}@127.0.0.1")
    assert "ssh-keygen" in in_calls(refused.value.next_steps)


@pytest.mark.usefixtures("client")
async def test_a_passphrase_protected_key_is_an_auth_failure(
    rewrite: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(tmp_path / "locked"))
    with pytest.raises(AuthFailed) as refused:
        await at(rewrite(f"IdentityFile {tmp_path}/locked")).open()
    wording(refused, f"{getpass.getuser()}@127.0.0.1")


# -------------------------------------------------------------------------------------------------------- host keys


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[tuple[Sshd, str]]:
    """A server with a host certificate, and the public key of its authority."""
    keygen(tmp_path / "authority")
    server = Sshd(tmp_path / "certified", more=f"HostCertificate {tmp_path}/certified/hostkey-cert.pub")
    server.prepare()
    argv = ["ssh-keygen", "-q", "-s", str(tmp_path / "authority"), "-I", "box", "-h", "-n", "127.0.0.1"]
    run(*argv, str(server.folder / "hostkey.pub"))
    server.start()
    yield server, " ".join((tmp_path / "authority.pub").read_text().split()[:2])
    server.stop()


@pytest.mark.slow
async def test_a_host_certified_by_its_authority_is_trusted(
    certified: tuple[Sshd, str], tmp_path: Path, wording: Wording
) -> None:
    server, authority = certified
    known = server.folder / "known_hosts"
    known.write_text(f"@cert-authority [127.0.0.1]:{server.port} {authority}\n")
    ssh = machine(server)
    key = await ssh.open()
    assert (key.line, key.first_contact) == (server.host_key, False), "the pin is the key that was certified"
    assert (await ssh.run(["true"])).code == 0
    await ssh.aclose()
    pinned = machine(server, pin=key.line)
    assert not (await pinned.open()).first_contact
    await pinned.aclose()
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    known.write_text(f"@cert-authority [127.0.0.1]:{server.port} {other}\n")
    with pytest.raises(HostKeyUnproven) as refused:
        await machine(server).open()
    wording(refused, refused.value.seen)
    known.write_text(f"@cert-authority [127.0.0.1]:{server.port} {authority}\n@revoked * {server.host_key}\n")
    with pytest.raises(HostKeyRevoked):
        await machine(server).open()


async def test_strict_host_key_checking_refuses_an_unknown_host(sshd: Sshd, rewrite: Callable[..., Path]) -> None:
    config = rewrite(f"IdentityFile {sshd.folder}/clientkey", "StrictHostKeyChecking yes")
    with pytest.raises(HostKeyUnproven, match="StrictHostKeyChecking") as refused:
        await at(config).open()
    assert refused.value.seen == fingerprint(sshd.host_key)
    ssh = at(config, pin=sshd.host_key)
    assert not (await ssh.open()).first_contact
    await ssh.aclose()


async def test_known_hosts_command_is_used(sshd: Sshd, rewrite: Callable[..., Path], tmp_path: Path) -> None:
    tool = tmp_path / "hosts"
    tool.write_text(f'#!/bin/sh\necho "$1 {sshd.host_key}"\n')
    tool.chmod(0o755)
    config = rewrite(
        f"IdentityFile {sshd.folder}/clientkey", f"KnownHostsCommand {tool} %H", "StrictHostKeyChecking yes"
    )
    ssh = at(config)
    assert not (await ssh.open()).first_contact
    await ssh.aclose()


async def test_the_users_own_files_are_read_and_never_written(sshd: Sshd) -> None:
    known = sshd.folder / "known_hosts"
    known.write_text("# mine\n")
    ssh = machine(sshd)
    try:
        assert (await ssh.open()).first_contact
        assert known.read_text() == "# mine\n"
    finally:
        await ssh.aclose()
        known.unlink()


# ------------------------------------------------------------------------------------------------------- jump hosts


@pytest.mark.usefixtures("client")
async def test_a_jump_host_that_shows_another_key_is_named(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    known = sshd.folder / "known_hosts"
    known.write_text(f"jumper {other}\n")
    config = tmp_path / "config"
    config.write_text(
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump hop\n"
        f"Host hop\n  HostName 127.0.0.1\n  Port {sshd.port}\n  HostKeyAlias jumper\n" + sshd.config.read_text()
    )
    try:
        with pytest.raises(HostKeyChanged, match="jumper") as refused:
            await Ssh(resolve("far", config=config), config=config).open()
        assert refused.value.pinned == fingerprint(other)
    finally:
        known.unlink()


@pytest.mark.slow
async def test_two_jump_hosts_work_and_a_refusing_jump_host_is_named(sshd: Sshd, tmp_path: Path) -> None:
    keygen(tmp_path / "stranger")
    config = tmp_path / "config"
    text = (
        f"Host far\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump one,two\n"
        f"Host one two\n  HostName 127.0.0.1\n  Port {sshd.port}\n"
    )
    config.write_text(text + sshd.config.read_text())
    ssh = Ssh(resolve("far", config=config), config=config)
    assert (await ssh.run(["echo", "through"])).out == b"through\n"
    await ssh.aclose()
    config.write_text(f"Host one\n  User nobody\n{text}{sshd.config.read_text()}")
    with pytest.raises(AuthFailed, match=r"nobody@127\.0\.0\.1"):
        await Ssh(resolve("far", config=config), config=config).open()


# ---------------------------------------------------------------------------------------------- accounts without shells


@pytest.mark.slow
@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("forced", "said"),
    [("internal-sftp", "allows sftp connections only"), ("/usr/lib/openssh/sftp-server", "SFTP"),
     ("/usr/sbin/nologin", "not available"), ("/bin/false", None),
     ('rbash -c "$SSH_ORIGINAL_COMMAND"', "restricted")],
)  # fmt: skip
async def test_an_account_without_a_shell_is_reported(tmp_path: Path, forced: str, said: str | None) -> None:
    need("the shells of this test", forced[0] != "/" or Path(forced).exists())
    server = Sshd(tmp_path / "s", more=f"ForceCommand {forced}").start()
    backend = SshBackend(SystemClock(), config=server.config)
    ssh = machine(server)
    try:
        with pytest.raises(NoShell, match=said):
            await ssh.run(["touch", str(tmp_path / "canary")])
        (finding,) = [
            f
            for f in await backend.check(Place(platform="ssh", host="box", run_root="/tmp"))
            if f.rule == "PF-HOST-001"
        ]
        assert finding.severity is Severity.ERROR and (said or "") in finding.message
        assert not (tmp_path / "canary").exists()
    finally:
        await ssh.aclose()
        await backend.aclose()
        server.stop()


# ------------------------------------------------------------------------------------------------- the master process


async def test_our_secrets_are_never_sent(
    sshd: Sshd, rewrite: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SendEnv *` in the user's configuration would send the whole environment."""
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa-not-for-machines")
    ssh = at(rewrite(f"IdentityFile {sshd.folder}/clientkey", "SendEnv *"))
    try:
        await ssh.run(["true"])
        opened = ssh.link.connection()
        assert isinstance(opened, Master)
        pid = opened.control.pid()
        assert b"HOME=" in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"not-for-machines" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"not-for-machines" not in (await ssh.run(["env"])).out
    finally:
        await ssh.aclose()


@pytest.mark.slow
async def test_a_close_leaves_no_master_process_or_folder(sshd: Sshd) -> None:
    ssh = machine(sshd)
    await ssh.run(["true"])
    opened = ssh.link.connection()
    assert isinstance(opened, Master)
    pid = opened.control.pid()
    await ssh.aclose()
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert not opened.folder.exists()


@pytest.mark.prove
async def test_a_killed_process_leaves_no_connection(sshd: Sshd, tmp_path: Path) -> None:
    """The master outlives the process by at most `ORPHAN_S` seconds."""
    code = f"""
import anyio, os, pathlib, signal
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.machine import Ssh
config = pathlib.Path({str(sshd.config)!r})
async def main():
    ssh = Ssh(resolve("box", config=config), config=config)
    await ssh.run(["true"])
    print(ssh.link.connection().control.pid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert ran.returncode == -signal.SIGKILL
    pid = int(ran.stdout)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), ORPHAN_S + 30)


@pytest.mark.slow
async def test_a_killed_master_is_a_lost_connection(sshd: Sshd) -> None:
    ssh = machine(sshd)
    stream = ssh.stream(["sh", "-c", "echo begun; exec sleep 100"])
    assert await anext(stream) == b"begun\n"
    cut(ssh)
    with pytest.raises(Unreachable):
        await anext(stream)
    assert (await ssh.run(["echo", "again"])).out == b"again\n"
    await ssh.aclose()
