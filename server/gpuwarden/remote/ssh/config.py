"""Read the user's SSH configuration for a host.

The installed OpenSSH client resolves the configuration (`ssh -G`), because only OpenSSH handles `Include`, `Match` and
the defaults. If no client is installed, paramiko reads `~/.ssh/config`.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.core.errors import BadRequest

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:%-]{0,254}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]{0,127}")
NO_AGENT = "none"
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")


@dataclass(frozen=True)
class Endpoint:
    """A connection's address and user. `alias` is the name given by the user or a provider; `host` is its address."""

    alias: str
    host: str
    port: int
    user: str
    identities: tuple[str, ...] = ()
    identities_only: bool = False
    proxy_jump: tuple[str, ...] = ()
    proxy_command: str | None = None
    known_hosts: tuple[str, ...] = ()
    host_key_alias: str | None = None
    known_hosts_command: str | None = None
    identity_agent: str | None = None
    """The agent socket to use instead of the one in SSH_AUTH_SOCK; `none` disables the agent."""
    certificates: tuple[str, ...] = ()
    """User certificates that are not stored next to their keys (`CertificateFile`)."""
    strict: bool = False
    """True if the user's configuration rejects unknown host keys (`StrictHostKeyChecking yes`)."""

    @property
    def known_as(self) -> str:
        """Return this host's name in known_hosts files."""
        name = self.host_key_alias or self.host
        return name if self.port == 22 or self.host_key_alias else f"[{name}]:{self.port}"

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


def check_host(host: str) -> str:
    """Return a host name or alias that is safe in argument lists and `ProxyCommand`, or raise `BadRequest`."""
    if not _HOST.fullmatch(host):
        raise BadRequest(f"{host[:100]!r} is not a valid host name", "Use letters, digits, dots, colons and dashes.")
    return host


def resolve(
    host: str, *, port: int | None = None, user: str | None = None, config: Path | None = None, timeout_s: float = 10
) -> Endpoint:
    """Look up `host` in the user's SSH configuration. `port` and `user`, if given, take precedence.

    `config` is a file to read instead of the user and system configuration. Raises `BadRequest` for an invalid name or
    configuration.
    """
    check_host(host)
    if user is not None and not _USER.fullmatch(user):
        raise BadRequest(
            f"{user[:100]!r} is not a valid user name", "Use letters, digits, dots, underscores and dashes."
        )
    if port is not None and not 0 < port < 65536:
        raise BadRequest(f"{port} is not a TCP port", "Valid ports are 1 to 65535.")
    ssh = shutil.which("ssh")
    found = _ask_openssh(ssh, host, port, user, config, timeout_s) if ssh else _ask_paramiko(host, config)
    return _endpoint(host, port, user, found)


def _ask_openssh(
    ssh: str, host: str, port: int | None, user: str | None, config: Path | None, timeout_s: float
) -> dict[str, list[str]]:
    argv = [ssh, "-G", *(["-F", str(config)] if config else []), *(["-p", str(port)] if port else [])]
    argv += [*(["-l", user] if user else []), "--", host]
    try:
        ran = subprocess.run(argv, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise BadRequest(
            f"`ssh -G {host}` did not finish within {timeout_s:g} s",
            "Check whether a Match exec command in ~/.ssh/config hangs.",
        ) from None
    if ran.returncode != 0:
        why = ran.stderr.decode("utf-8", "replace").strip()[-500:]
        raise BadRequest(f"the SSH configuration for {host} can't be read: {why}", "Correct ~/.ssh/config.")
    found: dict[str, list[str]] = {}
    for line in ran.stdout.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def _ask_paramiko(host: str, config: Path | None) -> dict[str, list[str]]:
    import paramiko

    path = config or Path.home() / ".ssh" / "config"
    try:
        read = paramiko.SSHConfig.from_path(str(path)) if path.exists() else paramiko.SSHConfig()
        options = read.lookup(host)
    except Exception as problem:
        raise BadRequest(
            f"{path} can't be read: {problem}", "Correct the file, or install the OpenSSH client."
        ) from problem
    return {k: v if isinstance(v, list) else [str(v)] for k, v in options.items()}


def _endpoint(alias: str, port: int | None, user: str | None, found: dict[str, list[str]]) -> Endpoint:
    def one(key: str) -> str | None:
        value = found.get(key, [""])[0]
        return None if value in {"", "none"} else value

    host = check_host(one("hostname") or alias)
    port = port or int(one("port") or 22)
    user = user or one("user") or getpass.getuser()
    tokens = {"h": host, "p": str(port), "r": user, "n": alias, "d": str(Path.home()), "u": getpass.getuser(), "%": "%"}
    files = [*_paths(one("userknownhostsfile") or "~/.ssh/known_hosts"), *_paths(one("globalknownhostsfile") or "")]
    command = one("proxycommand")
    return Endpoint(
        alias=alias,
        host=host,
        port=port,
        user=user,
        identities=_existing(found.get("identityfile") or [f"~/.ssh/{n}" for n in _DEFAULT_KEYS], tokens),
        identities_only=one("identitiesonly") == "yes",
        proxy_jump=tuple((one("proxyjump") or "").split(",")) if one("proxyjump") else (),
        proxy_command=_expand(command, tokens) if command else None,
        known_hosts=_existing(files, tokens),
        host_key_alias=one("hostkeyalias"),
        known_hosts_command=one("knownhostscommand"),
        identity_agent=_agent((found.get("identityagent") or [""])[0].strip('"'), tokens),
        certificates=_existing(found.get("certificatefile") or [], tokens),
        strict=one("stricthostkeychecking") in {"yes", "true"},
    )


def _agent(word: str, tokens: dict[str, str]) -> str | None:
    """Return the value of `IdentityAgent`: a socket, `none`, or None for the socket in SSH_AUTH_SOCK."""
    if word in {"", "SSH_AUTH_SOCK"}:
        return None
    if word.startswith("$"):
        return os.environ.get(word[1:].strip("{}")) or NO_AGENT
    return word if word == NO_AGENT else str(Path(_expand(word, tokens)).expanduser())


def _expand(text: str, tokens: dict[str, str]) -> str:
    return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), text)


def _paths(text: str) -> list[str]:
    """Split a list of paths. `ssh -G` removes quotes, so a path with spaces is recognized only if the file exists."""
    words = text.split()
    for end in range(len(words), 1, -1):
        if Path(" ".join(words[:end])).expanduser().is_file():
            return [" ".join(words[:end]), *_paths(" ".join(words[end:]))]
    return [words[0], *_paths(" ".join(words[1:]))] if words else []


def _existing(names: list[str], tokens: dict[str, str]) -> tuple[str, ...]:
    paths = (Path(_expand(n.strip('"'), tokens)).expanduser() for n in names)
    return tuple(str(p) for p in paths if p.is_file())


def parse_jump(hop: str) -> tuple[str, int | None, str | None]:
    """Parse one hop of `ProxyJump`, such as `[user@]host[:port]` or `ssh://...`, into host, port and user."""
    user, _, address = hop.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([0-9A-Fa-f:]+)", address)
    if not match:
        raise BadRequest(f"ProxyJump {hop!r} is invalid", "Use [user@]host[:port].")
    port = match[2] or match[4]
    return match[1] or match[3] or match[5], int(port) if port else None, user or None
