"""A temporary OpenSSH server on loopback, with separate keys and configuration."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from real_parts import need
from waiting import eventually

CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding yes
X11Forwarding no
PrintMotd no
UseDNS no
MaxStartups 100:30:200
LogLevel INFO
Subsystem sftp internal-sftp
SetEnv SHLVL=5 PATH={path} {variables}
{more}
"""
# SHLVL keeps bash from reading this user's ~/.bashrc, which may be slow and is not under test.


PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def free_port() -> int:
    """Return a free port, for a server that can't be given a socket.

    Another process may take the port before the server does. Then the caller must restart the server on another port.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(name="closed_port")
def closed_port_fixture() -> Iterator[int]:
    """Yield a port on loopback that refuses connections: it is bound, but no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def find_sshd() -> str:
    """Return the server's absolute path, which it needs to re-execute itself."""
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/libexec")
    need("sshd", found is not None)
    need("ssh-keygen", shutil.which("ssh-keygen") is not None)
    assert found
    return found


def keygen(path: Path) -> None:
    """Create an ed25519 key without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=300)


def launched(argv: list[str], log: Path, **more: Any) -> subprocess.Popen[bytes] | None:
    """Start a server and wait until it listens. Return None if another process uses its port."""
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **more)

    def said() -> bytes:
        over = process.poll() is not None
        text = log.read_bytes()[begin:]
        return text if over or b"Server listening on" in text else b""

    try:
        text = eventually(said)
    except BaseException:
        process.kill()
        raise
    if b"Server listening on" in text:
        return process
    assert b"Address already in use" in text, text.decode()
    return None


@dataclass
class Sshd:
    """One server. `config` is an ssh_config that names it `box`; `before` is a command prefix to start it elsewhere."""

    folder: Path
    more: str = ""
    path: str = PATH
    variables: str = ""
    before: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = None

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def host_key(self) -> str:
        return " ".join((self.folder / "hostkey.pub").read_text().split()[:2])

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("hostkey", "clientkey"):
            if not (self.folder / name).exists():
                keygen(self.folder / name)
        shutil.copy(self.folder / "clientkey.pub", self.folder / "authorized_keys")
        self.config.write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n"
            f"Host *\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/clientkey\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )

    def start(self, tries: int = 3) -> Sshd:
        """Start the server, on another port if its port is taken."""
        self.prepare()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (self.folder / "sshd_config").write_text(
            CONFIG.format(port=self.port, folder=self.folder, more=self.more, path=self.path, variables=self.variables)
        )
        argv = [*self.before, find_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.process = launched(argv, self.folder / "sshd.log")
        if self.process is not None:
            return self
        assert tries > 1, "three ports were taken"
        self.port = free_port()
        return self.start(tries - 1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None


@pytest.fixture(scope="module", name="sshd")
def sshd_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One server for a module."""
    server = Sshd(tmp_path_factory.mktemp("sshd")).start()
    yield server
    server.stop()
