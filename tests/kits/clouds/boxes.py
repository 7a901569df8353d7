"""Machines behind the emulators: one OpenSSH server each, with the rehearsal cloud's storage as its whole disk.

An emulated machine is a mount and process namespace on this machine. Its root is the instance's folder in the cloud,
with this machine's programs mounted. It starts and stops with its instance in the cloud and keeps its host key, but
gets a new port at each start, or a new address if the platform reports no ports. A linked volume of the account becomes
a mount.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from clouds.base import Emulator
from clouds.gpu import put_gpu
from gpuwarden.core.models import InstanceState
from gpuwarden.rehearsal.disk import mounted
from gpuwarden.rehearsal.model import MARKER
from sshd import find_sshd, free_port, keygen, launched

POWER_ON = """set -e
fs=$1; own=$2; begin=$3; shift 3
mount --bind "$fs" "$fs"
cd "$fs"
mkdir -p proc tmp root run/sshd home/"$LOGIN"
for dir in usr bin sbin lib lib64 etc dev sys; do
  [ -e "/$dir" ] || continue
  mkdir -p "$dir"
  mount --rbind "/$dir" "$fs/$dir"
done
mount --bind "$own" run/sshd
mount --bind "$own/passwd" etc/passwd
for tier in "$@"; do
  from="$fs$tier"
  if [ -L "$from" ]; then from=$(readlink -f "$from"); rm "$fs$tier"; mkdir "$fs$tier"; fi
  mount --bind "$from" "$fs$tier"
done
mount -t proc proc proc
HOME=/root chroot "$fs" /bin/sh -c "$begin"
exec chroot "$fs" "$SSHD" -D -e -f /run/sshd/sshd_config
"""
CONFIG = """ListenAddress {host}
Port {port}
HostKey /run/sshd/hostkey
AuthorizedKeysFile /run/sshd/authorized_keys .ssh/authorized_keys
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
UseDNS no
MaxStartups 100:30:200
LogLevel INFO
Subsystem sftp internal-sftp
SetEnv PATH=/run/sshd/bin:/usr/local/bin:/usr/bin:/bin {marker}={ident}
"""
PASSWD = "root:x:0:0:root:/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"


def possible() -> bool:
    """Return whether this process may create mount and process namespaces, which needs root on Linux."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        timeout=120,
    )
    return tried.returncode == 0


@dataclass
class _Machine:
    process: subprocess.Popen[bytes]
    host: str
    port: int
    since: float


class Machines:
    """The machines of one account. `config` is an ssh_config for connecting to them with the user's key."""

    def __init__(self, account: Emulator, folder: Path) -> None:
        self.account = account
        self.folder = folder
        self.on: dict[str, _Machine] = {}
        self.broken = 0
        """Uncorrected memory errors that the GPU of the next machine reports."""
        self.silent = False
        """Whether machines run without a listening SSH server."""
        self.image_keys: list[str] = []
        """Public keys in the image."""
        folder.mkdir(parents=True)
        keygen(folder / "clientkey")
        self.key = " ".join((folder / "clientkey.pub").read_text().split()[:2])
        self.config = folder / "ssh_config"
        self.boots = 0
        self.usual = socket.socket()
        """A socket that reserves a port for this account, so that no other process gets it on another address."""
        self.usual.bind(("127.0.0.1", 0))
        self._configure(self.usual.getsockname()[1])
        account.address = self.address

    def address(self, ident: str) -> tuple[str, int]:
        """Return the address of a machine, after starting or stopping it to match the cloud."""
        self.follow(ident)
        return (self.on[ident].host, self.on[ident].port) if ident in self.on else self.usual.getsockname()

    def follow(self, ident: str) -> None:
        """Start or stop a machine to match the cloud."""
        seen = self.account.see(ident)
        running = seen is not None and seen.state is InstanceState.RUNNING
        since = self.account.cloud.store.state().records[ident].since
        if ident in self.on and (not running or self.on[ident].since != since):
            self._power_off(ident)
        if running and not self.silent and ident not in self.on:
            self._power_on(ident, since)

    def close(self) -> None:
        """Stop all machines."""
        for ident in list(self.on):
            self._power_off(ident)
        self.usual.close()

    def renew_key(self, ident: str) -> None:
        """Use a new host key from the machine's next start."""
        for file in (self.folder / ident).glob("hostkey*"):
            file.unlink()

    def disk(self, ident: str) -> Path:
        """Return the path of a machine's disk on the host."""
        return self.account.cloud.root / "instances" / ident / "fs"

    def _next_address(self) -> tuple[str, int]:
        """Return the address of the next boot."""
        self.boots += 1
        if self.account.tells_port:
            return "127.0.0.1", free_port()
        return f"127.0.1.{self.boots}", self.usual.getsockname()[1]

    def _configure(self, port: int) -> None:
        """Write the user's ssh_config. Its port is used only if the platform reports none."""
        self.config.write_text(
            f"Host *\n  Port {port}\n  IdentityFile {self.folder}/clientkey\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )

    def _power_on(self, ident: str, since: float, tries: int = 3) -> None:
        own, (host, port) = self.folder / ident, self._next_address()
        login = self.account.profile.user or "root"
        own.mkdir(exist_ok=True)
        if not (own / "hostkey").exists():
            keygen(own / "hostkey")
        put_gpu(own / "bin", self.broken)
        (own / "passwd").write_text(PASSWD + (f"{login}:x:0:0::/home/{login}:/bin/sh\n" if login != "root" else ""))
        (own / "authorized_keys").write_text("\n".join(self._account_keys()) + "\n")
        (own / "sshd_config").write_text(CONFIG.format(host=host, port=port, marker=MARKER, ident=ident))
        record = self.account.cloud.store.state().records[ident]
        there = mounted(self.account.profile, durable=record.durable, sometimes=record.sometimes)
        tiers = [t.path for t in there if t.path != "/"]
        argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c"]
        argv += [POWER_ON, "sh", str(self.disk(ident)), str(own), self._begin(ident), *tiers]
        process = launched(argv, own / "log", env={**os.environ, "SSHD": find_sshd(), "LOGIN": login})
        if process is not None:
            self.on[ident] = _Machine(process, host, port, since)
            self._configure(port)
        else:
            assert tries > 1, "three ports were taken"
            self._power_on(ident, since, tries - 1)

    def _power_off(self, ident: str) -> None:
        """Cut the power: once the first process is killed, the kernel kills all others."""
        machine = self.on.pop(ident)
        machine.process.send_signal(signal.SIGKILL)
        machine.process.wait(120)

    def _account_keys(self) -> list[str]:
        """Return the public keys that the account permits on every machine."""
        named = (vars(self.account).get(name, []) for name in ("ssh_keys", "account_keys", "keys"))
        fields = ("public_key", "publicKey", "key")
        listed = [k if isinstance(k, str) else next(k[f] for f in fields if f in k) for keys in named for k in keys]
        return [*self.image_keys, *listed]

    def _begin(self, ident: str) -> str:
        """Return the shell line that starts a machine: it adds the key as images do, then runs the order's script."""
        order = self.account.own[ident].get("order", {})
        key = (order.get("env") or {}).get("PUBLIC_KEY")
        image = f"mkdir -p ~/.ssh; echo '{key}' >> ~/.ssh/authorized_keys" if key else "true"
        return f"{image}; {order.get('onstart') or order.get('start_command') or 'true'}"
