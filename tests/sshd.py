"""A throw-away OpenSSH server on loopback, with keys and configuration of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conftest import need

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
LogLevel ERROR
Subsystem sftp internal-sftp
SetEnv SHLVL=5 PATH={path} {variables}
{more}
"""
# SHLVL keeps bash from reading this user's own ~/.bashrc, which may be slow and is not under test.


PATH = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def find_sshd() -> str:
    """The server's absolute path, which it needs to start itself again."""
    found = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/libexec")
    need("sshd", found is not None)
    need("ssh-keygen", shutil.which("ssh-keygen") is not None)
    assert found
    return found


def keygen(path: Path) -> None:
    """A new ed25519 key without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=300)


@dataclass
class Sshd:
    """One server. `config` is an ssh_config that knows it as `box`; `before` are words that start it elsewhere."""

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

    def start(self) -> Sshd:
        self.prepare()
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        (self.folder / "sshd_config").write_text(
            CONFIG.format(port=self.port, folder=self.folder, more=self.more, path=self.path, variables=self.variables)
        )
        argv = [*self.before, find_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 300
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection((self.host, self.port), timeout=10).close()
                return self
            except OSError:
                time.sleep(0.02)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None


@pytest.fixture(scope="session", name="sshd")
def sshd_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """One server for the whole session."""
    server = Sshd(tmp_path_factory.mktemp("sshd")).start()
    yield server
    server.stop()
