"""A multiplexed connection through the system's `ssh`. Any login that works with the user's `ssh` also works here.

One master (`ssh -M`) runs per machine; commands use its control socket (`mux`). OpenSSH handles agents, hardware keys,
user and host certificates, jump hosts and all other options in ssh_config(5). This module sets only the host key
policy: known_hosts files are read but never written, a pinned key is the only accepted key, and the key that the host
presented is returned. `ssh` never prompts, and does not share connections with the user's `ssh`.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadReply, BadRequest, WardenError
from gpuwarden.core.sanitize import SECRET_NAME
from gpuwarden.remote.ssh.config import Endpoint, parse_jump, resolve
from gpuwarden.remote.ssh.host_keys import HostKey, KnownKeys, known_keys, public_key
from gpuwarden.remote.ssh.login_errors import explained
from gpuwarden.remote.ssh.mux import Control, MuxChannel

OLDEST: Final = (8, 5)
"""The first OpenSSH version with `KnownHostsCommand`, which reports the key that a host presents."""
CONNECT_S: Final = 15.0
LOGIN_S: Final = 60.0
"""The time limit for a login, during which an agent may prompt the user."""
MAX_HOPS: Final = 4
ORPHAN_S: Final = 10
_SOCKET_CHARS: Final = 80
"""macOS limits a socket's path to 104 characters, of which `ssh` temporarily uses 17 for a suffix."""
_ALIAS: Final = "gpuwarden"
_OPTIONS: Final = {
    "BatchMode": "yes",
    "NoHostAuthenticationForLocalhost": "no",
    "GlobalKnownHostsFile": "/dev/null",
    "HashKnownHosts": "no",
    "UpdateHostKeys": "no",
    "ControlPersist": str(ORPHAN_S),
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "Tunnel": "no",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "Compression": "no",
    "Ciphers": "^aes128-gcm@openssh.com",
    "LogLevel": "ERROR",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "3",
}
# Append the key that the host presents to a file, then run the user's `KnownHostsCommand` if one is set.
_RECORD: Final = """/bin/sh -c 'printf "%%s\\n" "$1" >> "$0"; shift; [ $# = 0 ] || exec "$@"' {shown} %K"""


def usable() -> str | None:
    """Return the path of a usable `ssh` program; None if none is found, as on Windows."""
    found = shutil.which("ssh")
    if found is None or not hasattr(socket, "send_fds"):
        return None
    return found if _version(found) >= OLDEST else None


@cache
def _version(ssh: str) -> tuple[int, ...]:
    """Return an OpenSSH client's version; (0,) for any other program."""
    try:
        ran = subprocess.run([ssh, "-V"], capture_output=True, stdin=subprocess.DEVNULL, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0,)
    found = re.match(rb"OpenSSH\w*?_(\d+)\.(\d+)", ran.stderr)
    return (int(found[1]), int(found[2])) if found else (0,)


@dataclass(frozen=True)
class Master:
    """An open connection. `folder` contains its control socket."""

    control: Control
    folder: Path
    key: HostKey

    @property
    def alive(self) -> bool:
        """Return whether the connection can run commands."""
        return self.control.alive()

    def open_channel(self, command: bytes) -> MuxChannel:
        """Start a command. Raises `SessionRefused` if the machine currently refuses another session."""
        return MuxChannel(self.folder / "s", self.control, command)

    def close(self) -> None:
        """Close the connection."""
        self.control.terminate()
        self.control.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def connect(ssh: str, endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None) -> Master:
    """Connect and log in with the user's configuration for this host. Blocks.

    Raises `HostKeyChanged`, `AuthFailed`, `BadReply` if the server is not an SSH server, and otherwise `Unreachable`.
    """
    known = known_keys(endpoint, pin)
    above = tempfile.gettempdir()
    if len(above) > _SOCKET_CHARS - 16:  # the socket's path would be too long
        above = "/tmp"  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="gw-", dir=above))
    try:
        return _Login(ssh, endpoint, known, config, folder).run()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@dataclass(frozen=True)
class _Login:
    """A login to one machine, which starts a master."""

    ssh: str
    endpoint: Endpoint
    known: KnownKeys
    config: Path | None
    folder: Path
    jumps: list[tuple[Endpoint, KnownKeys]] = field(default_factory=list)
    """The jump hosts, starting with the one nearest to the machine."""

    def run(self) -> Master:
        socket_path = self.folder / "s"
        argv = [*self._client(self.endpoint, self.known, "key"), "-f", "-N", "-M", "-S", str(socket_path)]
        argv += self._route(self.endpoint, 0)
        code, output = self._start([*argv, "--", self.endpoint.alias])
        if code != 0:
            raise self._explained(output)
        try:
            control = Control(socket_path)
        except OSError as lost:
            raise self._explained(output or str(lost)) from lost
        shown = self._shown()
        if shown is None:
            control.terminate()
            control.close()
            raise BadReply(
                f"ssh did not report the host key of {self.endpoint}", "Check that ssh allows KnownHostsCommand."
            )
        first = not self.known.pinned and (self.folder / "key.new").exists()
        return Master(control, self.folder, HostKey(shown, first_contact=first))

    def _client(self, endpoint: Endpoint, known: KnownKeys, name: str) -> list[str]:
        """Return the client's arguments for one host. The client writes the host's key to the file `name`."""
        new, shown = self.folder / f"{name}.new", self.folder / name
        options = dict(_OPTIONS)
        record = _RECORD.format(shown=_escaped(str(shown)))
        if known.pinned:
            lines = [f"{_ALIAS} {key}\n" for key in known.listed]
            lines += [f"@revoked {_ALIAS} {key}\n" for key in sorted(known.revoked)]
            new.write_text("".join(lines), encoding="ascii")
            files, options["HostKeyAlias"] = [str(new)], _ALIAS
        else:
            files = [str(new), *endpoint.known_hosts]
            record += f" {endpoint.known_hosts_command}" if endpoint.known_hosts_command else ""
        strict = bool(known.listed or known.certified or endpoint.strict)
        options |= {
            "StrictHostKeyChecking": "yes" if strict else "accept-new",
            "UserKnownHostsFile": " ".join(f'"{_escaped(f)}"' for f in files),
            "KnownHostsCommand": record,
            "ConnectTimeout": str(max(1, int(CONNECT_S))),
        }
        words = [self.ssh, *(["-F", str(self.config)] if self.config else [])]
        words += [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        return [*words, "-p", str(endpoint.port), "-l", endpoint.user]

    def _route(self, endpoint: Endpoint, hops: int) -> list[str]:
        """Return the options for an endpoint's jump hosts.

        `ssh -J` is not used, because it does not pass the options to jump hosts and would prompt for an unknown host
        key.
        """
        if not endpoint.proxy_jump:
            return []
        if hops >= MAX_HOPS:
            raise BadRequest(
                f"ProxyJump for {endpoint.alias} goes through more than {MAX_HOPS} hosts",
                "Check the ProxyJump entries in ~/.ssh/config for a loop.",
            )
        *before, last = endpoint.proxy_jump
        host, port, user = parse_jump(last)
        hop = resolve(host, port=port, user=user, config=self.config)
        if before:
            hop = replace(hop, proxy_jump=tuple(before))
        known = known_keys(hop, None)
        self.jumps.append((hop, known))
        words = [*self._client(hop, known, f"jump{hops}"), *self._route(hop, hops + 1)]
        words += ["-o", "ControlMaster=no", "-o", "ControlPath=none", "-E", str(self.folder / f"jump{hops}.log")]
        words = [w.replace("%", "%%") for w in words] + ["-W", "[%h]:%p", "--", hop.alias]
        return ["-o", "ProxyJump=none", "-o", f"ProxyCommand={shlex.join(words)}"]

    def _start(self, argv: list[str]) -> tuple[int, str]:
        """Run `ssh` until it goes into the background. Return the exit code and the stderr output."""
        errors = self.folder / "errors"
        # Without secrets, because the user's `SendEnv` setting could send them to the host.
        env = {name: value for name, value in os.environ.items() if not SECRET_NAME.search(name)}
        with errors.open("wb") as file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=env,
                start_new_session=True,
            )
            # `wait` with a timeout polls every 50 ms, which would delay a 200 ms login.
            limit = threading.Timer(LOGIN_S, process.kill)
            limit.start()
            try:
                code = process.wait()
            finally:
                limit.cancel()
        return code, errors.read_text("utf-8", "replace").strip()[-2000:]

    def _shown(self, name: str = "key") -> str | None:
        """Return the last key that a host presented; None if it did not present a key."""
        try:
            keys = (self.folder / name).read_text("ascii").split()
            return public_key(base64.b64decode(next(k for k in reversed(keys) if k != "NONE")))
        except (OSError, ValueError, StopIteration):
            return None

    def _explained(self, output: str) -> WardenError:
        """Return the error for the first connection that failed: to a jump host or to the machine."""
        for number, (hop, known) in reversed(list(enumerate(self.jumps))):
            log = self.folder / f"jump{number}.log"
            reason = log.read_text("utf-8", "replace") if log.exists() else ""
            shown = self._shown(f"jump{number}")
            wrong = known.judge(hop, shown) if shown else None
            if wrong or reason.strip():
                return wrong or explained(hop, reason.strip(), key_shown=shown is not None)
        shown = self._shown()
        wrong = self.known.judge(self.endpoint, shown) if shown else None
        return wrong or explained(self.endpoint, output, key_shown=shown is not None)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
