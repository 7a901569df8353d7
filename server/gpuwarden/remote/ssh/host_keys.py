"""Host keys: what a machine showed, what the user's known_hosts say of it, and the errors when the two disagree.

A key pinned for the instance is the only one accepted. Without a pin the user's known_hosts decide; a host that they
don't list is trusted once, and the key is handed back so that the caller records it as the pin. A changed key is
refused, always, and so is one that known_hosts mark as `@revoked`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest, Refused
from gpuwarden.remote.ssh.config import Endpoint

CERTIFIED: Final = "@cert-authority"
REVOKED: Final = "@revoked"
OPENSSH: Final = "Install OpenSSH's client, 8.5 or newer: gpuwarden uses it where it finds `ssh` on the PATH."
# As `ssh-keygen -H` writes a name: a salt and a digest of 20 bytes each.
_HASHED = re.compile(r"\|1\|([A-Za-z0-9+/]{27}=)\|([A-Za-z0-9+/]{27}=)")
_CERTIFICATE = "-cert-v01@openssh.com"
_FIELDS: Final = {"ssh-rsa": 2, "ssh-ed25519": 1}
"""Number of fields of a public key; an ECDSA key has two, its curve and its point."""


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
    """Nothing vouches for the host's key, and the user's configuration does not let an unknown one pass."""

    def __init__(self, endpoint: Endpoint, line: str, *, certified: bool, checked: bool = True) -> None:
        where, seen = endpoint.known_as, fingerprint(line)
        kind = next((k for k in ("ed25519", "ecdsa") if k in line.split()[0]), "rsa")
        lacking = f"no certificate of that authority for {seen} was seen" if checked else "paramiko checks none"
        why = (
            f"known_hosts leave {where} to a @cert-authority, and {lacking}"
            if certified
            else f"known_hosts do not list {where}, which shows {seen}, and StrictHostKeyChecking is yes for it"
        )
        Refused.__init__(
            self,
            f"{why}. Nothing was sent to it",
            f"{'Has the host certificate expired, or another name?' if checked else OPENSSH} "
            "To list the key itself, after comparing it: "
            f'echo "{where} $(ssh {endpoint.alias} cat /etc/ssh/ssh_host_{kind}_key.pub)" >> ~/.ssh/known_hosts'
            if certified
            else f"Compare it with the provider's console, then list it: ssh-keyscan -p {endpoint.port} "
            f"{endpoint.host} >> ~/.ssh/known_hosts",
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


def public_key(blob: bytes) -> str:
    """Return the line of a public key in wire format; of a certificate, the line of the key that it certifies.

    Raises `ValueError` for something else.
    """
    (kind, rest), fields = _field(blob), list[bytes]()
    name = kind.decode("ascii")
    if not name.endswith(_CERTIFICATE):
        return f"{name} {base64.b64encode(blob).decode()}"
    name = name.removesuffix(_CERTIFICATE)
    _, rest = _field(rest)  # a nonce
    for _ in range(_FIELDS.get(name, 2)):
        value, rest = _field(rest)
        fields.append(value)
    plain = b"".join(len(f).to_bytes(4, "big") + f for f in [name.encode(), *fields])
    return f"{name} {base64.b64encode(plain).decode()}"


def _field(data: bytes) -> tuple[bytes, bytes]:
    """Split the first length-prefixed field off."""
    end = 4 + int.from_bytes(data[:4], "big")
    if len(data) < max(end, 4):
        raise ValueError("a public key ends in the middle of a field")
    return data[4:end], data[end:]


# ------------------------------------------------------------------------------------------------------- known_hosts


@dataclass(frozen=True)
class KnownKeys:
    """The keys that a host may show (`type base64`), those that it may not, and whether an authority names it."""

    listed: tuple[str, ...]
    revoked: frozenset[str]
    certified: bool
    pinned: bool

    def judge(self, endpoint: Endpoint, seen: str, *, certificates: bool = True) -> HostKeyChanged | None:
        """Return the error for a key that proves nothing; None for one that is listed, or that may be new.

        `certificates`: the client checks those of hosts.
        """
        if seen in self.revoked:
            return HostKeyRevoked(endpoint.known_as, fingerprint(seen))
        if seen in self.listed:
            return None
        if self.listed and (self.pinned or not self.certified):
            return HostKeyChanged(endpoint.known_as, fingerprint(self.listed[0]), fingerprint(seen))
        if self.certified or endpoint.strict:
            return HostKeyUnproven(endpoint, seen, certified=self.certified, checked=certificates)
        return None


def known_keys(endpoint: Endpoint, pin: str | None) -> KnownKeys:
    """Read the user's known_hosts for one host. Raises `BadRequest` for a file or a pin that can't be read."""
    entries = [found for path in endpoint.known_hosts for found in _entries(path, endpoint.known_as)]
    revoked = frozenset(key for marker, key in entries if marker == REVOKED)
    if pin:
        fingerprint(pin)
        pin = " ".join(pin.split()[:2])
    listed = [pin] if pin else [key for marker, key in entries if not marker and key not in revoked]
    return KnownKeys(tuple(listed), revoked, not pin and any(m == CERTIFIED for m, _ in entries), bool(pin))


def _entries(path: str, host: str) -> Iterator[tuple[str, str]]:
    """Yield marker and key of each line of a known_hosts file that is about `host`; an unreadable line is skipped."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise BadRequest(f"{path} can't be read: {problem.strerror or problem}", "Check its permissions.") from problem
    for line in text.splitlines():
        marker, words = "", line.split()
        if words and words[0].startswith("@"):
            marker, *words = words
        if len(words) < 3 or words[0].startswith("#"):
            continue
        try:
            base64.b64decode(words[2], validate=True)
        except ValueError:
            continue
        # An authority for every host there is has not been asked about this one.
        patterns = [p for p in words[0].split(",") if marker != CERTIFIED or p.strip("*?[]:")]
        if _is_about(patterns, host):
            yield marker, f"{words[1]} {words[2]}"


def _is_about(patterns: Sequence[str], host: str) -> bool:
    """Return whether a line's host patterns match this host, as in sshd(8): hashed, with `*`, `?` and `!`."""
    found = False
    for pattern in patterns:
        if hashed := _HASHED.fullmatch(pattern):
            salt, digest = map(base64.b64decode, hashed.groups())
            found = found or hmac.digest(salt, host.encode(), "sha1") == digest
        elif fnmatchcase(host.lower(), pattern.lstrip("!").lower().replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            found = True
    return found
