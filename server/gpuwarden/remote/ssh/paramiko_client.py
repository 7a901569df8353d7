"""Connect with paramiko, on systems without a usable `ssh` (such as Windows). All calls block.

paramiko reads a user's certificate only if it is stored next to its key, and does not check host certificates. Errors
caused by these limitations mention them. `openssh` has neither limitation.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Unreachable
from gpuwarden.remote.ssh.config import NO_AGENT, Endpoint, parse_jump, resolve
from gpuwarden.remote.ssh.host_keys import OPENSSH, HostKey, HostKeyChanged, KnownKeys, fingerprint, known_keys
from gpuwarden.remote.ssh.login_errors import denied_login
from gpuwarden.remote.ssh.mux import TICK_S

if TYPE_CHECKING:
    import paramiko

CONNECT_S = 15.0
KEEPALIVE_S = 15
OPEN_S = 15.0
MAX_HOPS = 4
# paramiko deadlocks if a channel closes during rekeying, which by default happens every 512 MiB. OpenSSH rekeys AES
# connections after 64 GiB.
REKEY_BYTES = 16 << 30
# Only the message distinguishes a connection that was lost during authentication from a rejected key.
_LOST = ("transport shut down", "saw EOF", "timeout")
_NO_METHOD = "No authentication methods available"
AGENT_S = 60.0
"""The time limit for a response from the agent, which may prompt the user."""
_FAST_FIRST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")


@dataclass(frozen=True)
class Opened:
    """An open transport, its host key, and the connection to its jump host. `client` owns the transport."""

    client: paramiko.SSHClient
    transport: paramiko.Transport
    key: HostKey
    jumps: tuple[Opened, ...] = ()
    proxy: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Return whether the connection can run commands."""
        return bool(self.transport.is_active())

    def open_channel(self, command: bytes) -> ParamikoChannel:
        """Start a command. Raises `OSError` if the machine currently refuses another session."""
        import paramiko

        try:
            # Catch every SSHException: if two sessions are refused at once, one of the errors is a plain SSHException.
            channel = self.transport.open_session(timeout=OPEN_S)
        except (paramiko.SSHException, EOFError) as problem:
            raise ConnectionError(str(problem)) from problem
        return ParamikoChannel(channel, command)

    def close(self) -> None:
        """Close this connection, then the connection to the jump host."""
        self.client.close()
        _close(self.jumps, self.proxy)


class ParamikoChannel:
    """One command, as a `Channel`. Methods wait at most `TICK_S` seconds before raising `TimeoutError`."""

    def __init__(self, channel: paramiko.Channel, command: bytes) -> None:
        self._channel: Any = channel
        with _translated():
            channel.exec_command(command)

    def send(self, data: memoryview) -> int:
        """Send to stdin; return the number of bytes accepted. Raises `BrokenPipeError` if the command closed stdin."""
        self._channel.settimeout(TICK_S)
        with _translated():
            try:
                return int(self._channel.send(data[: 1 << 18]))
            except TimeoutError:
                raise
            except OSError:
                if self._channel.exit_status_ready():
                    raise BrokenPipeError from None
                raise

    def end_input(self) -> None:
        """Close stdin."""
        with _translated():
            self._channel.shutdown_write()

    def receive_into(self, buffer: memoryview, wait_s: float = TICK_S) -> int:
        """Read from stdout; return 0 at its end. Raises `ConnectionError` if the connection ended before that."""
        self._channel.settimeout(wait_s)
        with _translated():
            data = bytearray(self._channel.recv(len(buffer)))
            while data and len(data) < len(buffer) // 2 and self._channel.recv_ready():
                data += self._channel.recv(len(buffer) - len(data))
        if not data and not self._channel.eof_received and not self._channel.transport.is_active():
            raise ConnectionError(self._channel.transport.get_exception() or "the connection was lost during output")
        buffer[: len(data)] = data
        return len(data)

    def errors(self) -> bytes:
        """Return stderr output received since the last call, without waiting."""
        output = bytearray()
        while self._channel.recv_stderr_ready():
            output += self._channel.recv_stderr(1 << 16)
        return bytes(output)

    def exited(self) -> bool:
        """Return whether the command is known to have ended."""
        return bool(self._channel.exit_status_ready())

    def code(self) -> int | None:
        """Return the exit code; None if a signal ended the command.

        Raises `ConnectionError` if the connection is lost.
        """
        if not self._channel.status_event.wait(TICK_S):
            raise TimeoutError
        if self._channel.exit_status >= 0:
            # Wait until the machine closes the session, because an open session counts toward the limit.
            end = time.monotonic() + 0.5
            while not self._channel.closed and time.monotonic() < end:
                time.sleep(0.0005)
            return int(self._channel.exit_status)
        if self._channel.transport.is_active() and self._channel.closed:
            return None
        raise ConnectionError("the connection ended before the command did")

    def close(self) -> None:
        """Close the channel. The command is not killed."""
        with suppress(Exception):
            self._channel.close()


@contextmanager
def _translated() -> Iterator[None]:
    """Convert the errors that paramiko raises for a lost connection to `ConnectionError`."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, EOFError) as lost:
        raise ConnectionError(str(lost) or "no reason given") from lost


def _close(jumps: tuple[Opened, ...], proxy: subprocess.Popen[bytes] | None) -> None:
    for hop in jumps:
        hop.close()
    if proxy is not None:
        proxy.kill()
        proxy.wait()


def connect(endpoint: Endpoint, *, pin: str | None = None, config: Path | None = None, hops: int = 0) -> Opened:
    """Connect and log in with the keys and the agent.

    Raises `HostKeyChanged`, `AuthFailed`, `BadReply` if the server is not an SSH server, or `Unreachable`.
    """
    jumps = _open_jumps(endpoint, config, hops)
    proxy = None
    try:
        if jumps:
            where = (endpoint.host, endpoint.port)
            try:
                sock = jumps[0].transport.open_channel("direct-tcpip", where, ("127.0.0.1", 0), timeout=CONNECT_S)
            except Exception as problem:
                raise Unreachable(
                    f"the jump host can't reach {endpoint}: {problem}", "Check the connection with ssh -J."
                ) from problem
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
        raise BadRequest(
            f"ProxyJump for {endpoint.alias} goes through more than {MAX_HOPS} hosts",
            "Check the ProxyJump entries in ~/.ssh/config for a loop.",
        )
    *before, last = endpoint.proxy_jump
    host, port, user = parse_jump(last)
    hop = resolve(host, port=port, user=user, config=config)
    if before:
        hop = Endpoint(**{**vars(hop), "proxy_jump": tuple(before)})
    return (connect(hop, config=config, hops=hops + 1),)


def _through_command(command: str) -> tuple[Any, subprocess.Popen[bytes] | None]:
    """Start the user's ProxyCommand, which ssh_config(5) defines as a shell command line; return its socket."""
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
            "The instance may be booting or stopped, or its port may have changed when it was last started.",
        ) from problem
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Nagle's algorithm delays consecutive execs
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # to detect a dead peer
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3 * KEEPALIVE_S * 1000)
    return sock


def _handshake(endpoint: Endpoint, sock: Any, pin: str | None) -> tuple[Any, Any, HostKey]:
    import paramiko

    logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # paramiko also raises the errors that it logs
    client = paramiko.SSHClient()
    known = known_keys(endpoint, pin)
    keys = client.get_host_keys()
    name = endpoint.host if endpoint.port == 22 else f"[{endpoint.host}]:{endpoint.port}"
    for line in reversed(known.listed):  # the first line of each key type takes precedence
        with suppress(Exception):  # a key type that paramiko does not support
            key = paramiko.hostkeys.HostKeyEntry.from_line(f"{name} {line}").key
            if line not in known.revoked:
                keys.add(name, key.get_name(), key)
    policy = _TrustOnce(endpoint, known)
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
    """paramiko's policy for an unknown host: accept it on first contact, unless `KnownKeys.judge` returns an error."""

    def __init__(self, endpoint: Endpoint, known: KnownKeys) -> None:
        self.endpoint, self.known = endpoint, known
        self.trusted = False

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        if wrong := self.known.judge(self.endpoint, _line(key), certificates=False):
            raise wrong
        self.trusted = True


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

    try:
        client.connect(
            endpoint.host,
            endpoint.port,
            username=endpoint.user,
            key_filename=[key for key in endpoint.identities if not key.endswith(".pub")],
            allow_agent=not endpoint.identities_only and endpoint.identity_agent is None,
            look_for_keys=False,
            sock=sock,
            timeout=CONNECT_S,
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
            channel_timeout=CONNECT_S,
            transport_factory=make,
        )
    except paramiko.SSHException as refused:
        # Either error means that the host key was accepted and the connection is still waiting for a login.
        if not isinstance(refused, paramiko.AuthenticationException) and _NO_METHOD not in str(refused):
            raise
        if not _login_by_agent(client.get_transport(), endpoint):
            raise


def _login_by_agent(transport: Any, endpoint: Endpoint) -> bool:
    """Log in with keys from an agent that paramiko does not query by itself. Return whether a key was accepted.

    paramiko ignores the agent set by `IdentityAgent`. If `IdentitiesOnly` is set, only keys from the configured
    identity files are tried.
    """
    import paramiko

    where = endpoint.identity_agent or os.environ.get("SSH_AUTH_SOCK", "")
    if not where or where == NO_AGENT or (endpoint.identity_agent is None and not endpoint.identities_only):
        return False
    if not hasattr(socket, "AF_UNIX"):
        raise AuthFailed(f"paramiko can't use the agent {where} for {endpoint} on this system", OPENSSH)
    agent: Any = paramiko.agent.AgentSSH()
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.settimeout(AGENT_S)
            line.connect(where)
            agent._connect(line)  # noqa: SLF001 (the public classes only use SSH_AUTH_SOCK)
            keys = agent.get_keys()
        except (OSError, paramiko.SSHException):
            return False  # the login error then describes the agent
        if endpoint.identities_only:
            named = {_public_half(path) for path in endpoint.identities}
            keys = [key for key in keys if key.get_base64() in named]
        for key in keys:
            if not transport.is_active():
                return False
            with suppress(paramiko.SSHException):
                transport.auth_publickey(endpoint.user, key)
                return bool(transport.is_authenticated())
    return False


def _public_half(identity: str) -> str:
    """Return an identity's public key in base64; empty if the file can't be read."""
    try:
        return Path(identity if identity.endswith(".pub") else f"{identity}.pub").read_text("ascii").split()[1]
    except (OSError, ValueError, IndexError):
        return ""


def _explain(endpoint: Endpoint, problem: BaseException) -> BaseException:
    """Return the `WardenError` for a connection failure."""
    import paramiko

    text = str(problem) or type(problem).__name__
    match problem:
        case HostKeyChanged():
            return problem
        case paramiko.BadHostKeyException():
            was, now = (fingerprint(_line(k)) for k in (problem.expected_key, problem.key))
            return HostKeyChanged(endpoint.known_as, was, now)
        case paramiko.BadAuthenticationType():
            return denied_login(endpoint, list(problem.allowed_types), text)
        case paramiko.PasswordRequiredException():
            return AuthFailed(f"a key for {endpoint} is encrypted", "Add the key to the agent: ssh-add.")
        case paramiko.AuthenticationException() if any(words in text for words in _LOST):
            return Unreachable(f"the connection to {endpoint} ended before the login: {text[:200]}", "Try again.")
        case paramiko.SSHException() if isinstance(problem, paramiko.AuthenticationException) or _NO_METHOD in text:
            if endpoint.certificates:
                return AuthFailed(
                    f"{endpoint} accepted none of the keys, and paramiko does not read CertificateFile "
                    f"({', '.join(endpoint.certificates)})",
                    f"Store the certificate next to its key as KEY-cert.pub, or use OpenSSH. {OPENSSH}",
                )
            return denied_login(endpoint, ["publickey"], text)
        case paramiko.SSHException() if "Indecipherable" in text:
            return BadReply(
                f"{endpoint.host} port {endpoint.port} is not an SSH server: {text[:200]}", "Check the port."
            )
        case paramiko.SSHException() | OSError() | EOFError():
            return Unreachable(
                f"the SSH handshake with {endpoint} failed: {text[:300]}",
                "The instance may be booting or limiting connections; try again.",
            )
        case Exception():
            return Unreachable(f"the SSH connection to {endpoint} failed: {type(problem).__name__}: {text[:300]}")
    return problem
