"""Open one authenticated SSH transport and verify its host key. Blocking: call it from a worker thread.

Host keys: a key pinned for the instance is the only one accepted. Without a pin the user's known_hosts decide;
a host they don't list is trusted once, and the key is handed back so that the caller records it as the pin. A
changed key is refused, always, and so is one that known_hosts mark as revoked. Certificates of hosts are not read:
where only a `@cert-authority` line that names the host speaks for it, the host is refused rather than trusted unseen.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Refused, Unreachable
from gpuwarden.remote.ssh.config import Endpoint, parse_jump, resolve

if TYPE_CHECKING:
    import paramiko

CONNECT_S = 15.0
KEEPALIVE_S = 15
MAX_HOPS = 4
# paramiko deadlocks when a channel closes while it renews keys, which it does every 512 MiB by default.
# OpenSSH renews AES keys after 64 GiB.
REKEY_BYTES = 16 << 30
# paramiko's message alone shows that the connection was lost while a key was tried; the key was not refused.
_LOST = ("transport shut down", "saw EOF", "timeout")
CERTIFIED = "@cert-authority"
# As `ssh-keygen -H` writes a name: a salt and a digest of 20 bytes each.
_HASHED = re.compile(r"\|1(\|[A-Za-z0-9+/]{27}=){2}")
_FAST_FIRST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")


class HostKeyChanged(Refused):
    """The machine shows another key than the one recorded at first contact. `pinned` and `seen` are fingerprints."""

    def __init__(self, where: str, pinned: str, seen: str) -> None:
        super().__init__(
            f"the host key of {where} changed: recorded {pinned}, now {seen}. Nothing was sent to it",
            "It is another machine at the same address, or an attacker in between. If the instance was re-created, "
            "verify the new fingerprint in the provider's console and register the instance again; for an entry in "
            f"known_hosts: ssh-keygen -R '{where}'.",
        )
        self.pinned, self.seen = pinned, seen


class HostKeyRevoked(HostKeyChanged):
    """The machine shows a key that the user's known_hosts mark as `@revoked`."""

    def __init__(self, where: str, seen: str) -> None:
        Refused.__init__(
            self,
            f"the host key {seen} of {where} is marked @revoked in known_hosts. Nothing was sent to it",
            "Somebody may have that key. Give the machine a new one, and verify it in the provider's console.",
        )
        self.pinned, self.seen = "", seen


class HostKeyUnproven(HostKeyChanged):
    """The user's known_hosts trust the host by certificate only, which is not supported here, and list no key of it."""

    def __init__(self, endpoint: Endpoint, line: str) -> None:
        where, seen = endpoint.known_as, fingerprint(line)
        kind = next((k for k in ("ed25519", "ecdsa") if k in line.split()[0]), "rsa")
        Refused.__init__(
            self,
            f"known_hosts leave {where} to a @cert-authority, and gpuwarden reads no host certificates: whether {seen} "
            "is its key can't be checked. Nothing was sent to it",
            "ssh does read them. Let it fetch the key itself, then try again: "
            f'echo "{where} $(ssh {endpoint.alias} cat /etc/ssh/ssh_host_{kind}_key.pub)" >> ~/.ssh/known_hosts',
        )
        self.pinned, self.seen = "", seen


@dataclass(frozen=True)
class HostKey:
    """A host's public key as OpenSSH writes it (`ssh-ed25519 AAAA...`), and whether it was trusted just now."""

    line: str
    first_contact: bool

    @property
    def fingerprint(self) -> str:
        """Return `SHA256:...`, as `ssh-keygen -l` shows it."""
        return fingerprint(self.line)


def fingerprint(line: str) -> str:
    """Return the SHA256 fingerprint of a public key line. Raises `BadRequest` for something else."""
    try:
        blob = base64.b64decode(line.split()[1], validate=True)
    except (IndexError, ValueError):
        raise BadRequest(f"{line[:80]!r} is not a public key", "Expected `type base64`.") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


@dataclass(frozen=True)
class Opened:
    """An open transport, its host key, and its jump host's connection. `client` owns the transport."""

    client: paramiko.SSHClient
    transport: paramiko.Transport
    key: HostKey
    jumps: tuple[Opened, ...] = ()
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Return whether commands can be sent."""
        return bool(self.transport.is_active())

    def close(self) -> None:
        """Close this connection, then the jump host's."""
        self.client.close()
        _close(self.jumps, self.proxy)


def _close(jumps: tuple[Opened, ...], proxy: subprocess.Popen[bytes] | None) -> None:
    for hop in jumps:
        hop.close()
    if proxy is not None:
        proxy.kill()
        proxy.wait()


def connect(endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None, hops: int = 0) -> Opened:
    """Connect and authenticate with keys and agent.

    Raises `HostKeyChanged`, `AuthFailed`, `BadReply` when something else than SSH answers, else `Unreachable`.
    """
    jumps = _open_jumps(endpoint, config, hops)
    proxy = None
    try:
        if jumps:
            sock = _through_jump(endpoint, jumps[0])
        elif endpoint.proxy_command:
            sock, proxy = _through_command(endpoint.proxy_command)
        else:
            sock = _direct(endpoint)
        client, transport, key = _handshake(endpoint, sock, pin)
    except BaseException:
        _close(jumps, proxy)
        raise
    return Opened(client, transport, key, jumps, proxy)


def _open_jumps(endpoint: Endpoint, config: Path | None, hops: int) -> tuple[Opened, ...]:
    if not endpoint.proxy_jump:
        return ()
    if hops >= MAX_HOPS:
        raise BadRequest(f"ProxyJump of {endpoint.alias} goes through more than {MAX_HOPS} hosts", "Is it a loop?")
    *before, last = endpoint.proxy_jump
    host, port, user = parse_jump(last)
    hop = resolve(host, port=port, user=user, config=config)
    if before:
        hop = Endpoint(**{**vars(hop), "proxy_jump": tuple(before)})
    return (connect(hop, config=config, hops=hops + 1),)


def _through_jump(endpoint: Endpoint, jump: Opened) -> Any:
    try:
        return jump.transport.open_channel(
            "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=CONNECT_S
        )
    except Exception as problem:
        raise Unreachable(f"the jump host can't reach {endpoint}: {problem}", "Try it with ssh -J.") from problem


def _through_command(command: str) -> tuple[Any, subprocess.Popen[bytes] | None]:
    """Return the user's own ProxyCommand, which ssh_config(5) defines as a line for the shell."""
    if sys.platform == "win32":
        import paramiko

        return paramiko.ProxyCommand(command), None
    ours, theirs = socket.socketpair()
    with theirs:
        end = theirs.fileno()
        argv = ["/bin/sh", "-c", f"exec {command}"]
        return ours, subprocess.Popen(argv, stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True)


def _direct(endpoint: Endpoint) -> socket.socket:
    try:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=CONNECT_S)
    except OSError as problem:
        raise Unreachable(
            f"{endpoint.host} port {endpoint.port} can't be reached: {problem.strerror or problem}",
            "The instance may be booting, stopped, or have another port since its last start.",
        ) from problem
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Nagle's delay stalls execs in a row
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # to notice a dead peer
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3 * KEEPALIVE_S * 1000)
    return sock


def _handshake(endpoint: Endpoint, sock: Any, pin: str | None) -> tuple[Any, Any, HostKey]:
    import paramiko

    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # its errors are raised as well; once is enough
    client = paramiko.SSHClient()
    policy = _TrustOnce(endpoint, *_load_known(client.get_host_keys(), endpoint, pin))
    client.set_missing_host_key_policy(policy)
    try:
        _authenticate(client, endpoint, sock)
    except BaseException as problem:
        client.close()
        sock.close()
        raise _explain(endpoint, problem) from problem
    transport = client.get_transport()
    assert transport is not None
    transport.set_keepalive(int(KEEPALIVE_S))
    return client, transport, HostKey(_line(transport.get_remote_server_key()), first_contact=policy.trusted)


class _TrustOnce:
    """paramiko's policy for a host nobody knows: remember that it was new, unless its key is known to be bad."""

    def __init__(self, endpoint: Endpoint, revoked: set[str], certified: bool) -> None:
        self.endpoint, self.revoked, self.certified = endpoint, revoked, certified
        self.trusted = False

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        if _line(key) in self.revoked:
            raise HostKeyRevoked(self.endpoint.known_as, fingerprint(_line(key)))
        if self.certified:
            raise HostKeyUnproven(self.endpoint, _line(key))
        self.trusted = True


def _load_known(keys: Any, endpoint: Endpoint, pin: str | None) -> tuple[set[str], bool]:
    """Fill `keys` with what this host may show. Returns the keys it may not, and whether it has an authority."""
    import paramiko

    name = endpoint.host if endpoint.port == 22 else f"[{endpoint.host}]:{endpoint.port}"
    listed = [found for path in endpoint.known_hosts for found in _entries(path, endpoint.known_as)]
    revoked = {_line(key) for marker, key in listed if marker == "@revoked"}
    if pin:
        fingerprint(pin)
        known = [paramiko.hostkeys.HostKeyEntry.from_line(f"{name} {pin}").key]
    else:
        known = [key for marker, key in reversed(listed) if not marker]  # of one type the first line counts
    for key in known:
        if _line(key) not in revoked:
            keys.add(name, key.get_name(), key)
    return revoked, any(marker == CERTIFIED for marker, _ in listed)


def _entries(path: str, host: str) -> Iterator[tuple[str, Any]]:
    """Yield marker and key of each line of a known_hosts file that is about `host`; an unreadable line is skipped."""
    import paramiko

    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise BadRequest(f"{path} can't be read: {problem.strerror or problem}", "Check its permissions.") from problem
    for line in text.splitlines():
        marker, _, rest = line.strip().partition(" ") if line.lstrip().startswith("@") else ("", "", line.strip())
        if not rest or rest.startswith("#"):
            continue
        try:
            entry = paramiko.hostkeys.HostKeyEntry.from_line(rest.lstrip())
        except Exception:  # noqa: S112
            continue
        # An authority for every host there is has not been asked about this one.
        patterns = [p for p in entry.hostnames if marker != CERTIFIED or p.strip("*?[]:")] if entry else []
        if entry is not None and _is_about(patterns, host):
            yield marker, entry.key


def _is_about(patterns: Sequence[str], host: str) -> bool:
    """Return whether a line's host patterns match this host, as in sshd(8): hashed, with `*`, `?` and `!`."""
    import paramiko

    found: bool | None = False
    for pattern in patterns:
        if pattern.startswith("|1|"):
            found = found or (_HASHED.fullmatch(pattern) and paramiko.HostKeys.hash_host(host, pattern) == pattern)
            continue
        if fnmatchcase(host.lower(), pattern.lstrip("!").lower().replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            found = True
    return bool(found)


def _line(key: Any) -> str:
    return f"{key.get_name()} {key.get_base64()}"


def _authenticate(client: paramiko.SSHClient, endpoint: Endpoint, sock: Any) -> None:
    import paramiko

    def make(sock: Any, **options: Any) -> paramiko.Transport:
        transport = paramiko.Transport(sock, **options)
        transport.get_security_options().ciphers = _FAST_FIRST
        transport.packetizer.REKEY_BYTES = REKEY_BYTES
        transport.packetizer.REKEY_PACKETS = 1 << 31
        return transport

    client.connect(
        endpoint.host,
        endpoint.port,
        username=endpoint.user,
        key_filename=list(endpoint.identities),
        allow_agent=not endpoint.identities_only,
        look_for_keys=False,
        sock=sock,
        timeout=CONNECT_S,
        banner_timeout=CONNECT_S,
        auth_timeout=CONNECT_S,
        channel_timeout=CONNECT_S,
        transport_factory=make,
    )


def _explain(endpoint: Endpoint, problem: BaseException) -> BaseException:
    """Return the `WardenError` for a connection failure."""
    import paramiko

    text = str(problem) or type(problem).__name__
    match problem:
        case HostKeyRevoked() | HostKeyUnproven():
            return problem
        case paramiko.BadHostKeyException():
            was, now = (fingerprint(_line(k)) for k in (problem.expected_key, problem.key))
            return HostKeyChanged(endpoint.known_as, was, now)
        case paramiko.BadAuthenticationType():
            allowed = ", ".join(problem.allowed_types) or "nothing we have"
            return AuthFailed(
                f"{endpoint} accepts no public key, only {allowed}",
                "gpuwarden uses keys and the agent: add your public key there.",
            )
        case paramiko.PasswordRequiredException():
            return AuthFailed(f"a key for {endpoint} is encrypted", "Add it to the agent: ssh-add.")
        case paramiko.AuthenticationException() if any(words in text for words in _LOST):
            return Unreachable(f"the connection to {endpoint} ended before the login: {text[:200]}", "Try again.")
        case paramiko.AuthenticationException():
            keys = ", ".join(endpoint.identities) or "no key file"
            return AuthFailed(
                f"{endpoint} accepted none of our keys ({keys}, agent): {text}",
                "Is the public key in the instance's authorized_keys, or in the provider's account?",
            )
        case paramiko.SSHException() if "Indecipherable" in text:
            return BadReply(
                f"{endpoint.host} port {endpoint.port} answers, but not with SSH: {text[:200]}", "Check the port."
            )
        case paramiko.SSHException() | OSError() | EOFError():
            return Unreachable(
                f"the SSH handshake with {endpoint} failed: {text[:300]}",
                "It may be booting or refusing too many connections; try again.",
            )
        case Exception():
            return Unreachable(f"the SSH connection to {endpoint} failed: {type(problem).__name__}: {text[:300]}")
    return problem
