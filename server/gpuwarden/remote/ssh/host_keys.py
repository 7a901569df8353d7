"""Check host keys: compare the key that a machine presents with the pinned key or the user's known_hosts files.

If a key is pinned for the instance, only that key is accepted. Without a pin, the key is compared with the user's
known_hosts files. A host that is not listed there is trusted on first contact, and its key is returned so that the
caller can pin it. A changed key is always refused, as is a key that is marked `@revoked` in a known_hosts file.
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
OPENSSH: Final = "Install the OpenSSH client, 8.5 or newer: gpuwarden uses it if `ssh` is on the PATH."
# A name hashed by `ssh-keygen -H`: a 20-byte salt and a 20-byte digest.
_HASHED = re.compile(r"\|1\|([A-Za-z0-9+/]{27}=)\|([A-Za-z0-9+/]{27}=)")
_CERTIFICATE = "-cert-v01@openssh.com"
_FIELDS: Final = {"ssh-rsa": 2, "ssh-ed25519": 1}
"""The number of fields in a public key. An ECDSA key has two: the curve and the point."""


class HostKeyChanged(Refused):
    """The machine presented a key that differs from the recorded key. `pinned` and `seen` are fingerprints."""

    def __init__(self, where: str, pinned: str, seen: str) -> None:
        super().__init__(
            f"the host key of {where} changed: recorded {pinned}, now {seen}. Nothing was sent to the machine",
            "Another machine may have this address, or an attacker may be intercepting the connection. For a recreated "
            "instance, verify the new fingerprint in the provider's console and register the instance again. To remove "
            f"an entry from known_hosts: ssh-keygen -R '{where}'.",
        )
        self.pinned, self.seen = pinned, seen


class HostKeyRevoked(HostKeyChanged):
    """The machine presented a key that is marked `@revoked` in the user's known_hosts files."""

    def __init__(self, where: str, seen: str) -> None:
        Refused.__init__(
            self,
            f"the host key {seen} of {where} is marked @revoked in known_hosts. Nothing was sent to the machine",
            "The key may be compromised. Create a new host key on the machine and verify it in the provider's console.",
        )
        self.pinned, self.seen = "", seen


class HostKeyUnproven(HostKeyChanged):
    """No known_hosts entry or certificate confirms the host key, and the user's settings reject unknown keys."""

    def __init__(self, endpoint: Endpoint, line: str, *, certified: bool, checked: bool = True) -> None:
        where, seen = endpoint.known_as, fingerprint(line)
        kind = next((k for k in ("ed25519", "ecdsa") if k in line.split()[0]), "rsa")
        lacking = (
            f"no valid certificate was presented for {seen}" if checked else "paramiko does not check certificates"
        )
        why = (
            f"known_hosts has a @cert-authority for {where}, but {lacking}"
            if certified
            else f"{where} presented {seen}, but is not in known_hosts, and StrictHostKeyChecking is set to yes"
        )
        Refused.__init__(
            self,
            f"{why}. Nothing was sent to the machine",
            f"{'Check the expiration date and names in the host certificate.' if checked else OPENSSH} "
            "Or compare the key and add it to known_hosts: "
            f'echo "{where} $(ssh {endpoint.alias} cat /etc/ssh/ssh_host_{kind}_key.pub)" >> ~/.ssh/known_hosts'
            if certified
            else "Compare the key with the fingerprint in the provider's console, then add it: "
            f"ssh-keyscan -p {endpoint.port} "
            f"{endpoint.host} >> ~/.ssh/known_hosts",
        )
        self.pinned, self.seen = "", seen


@dataclass(frozen=True)
class HostKey:
    """A host's public key in OpenSSH's format (`ssh-ed25519 AAAA...`).

    `first_contact` is true if the host was unknown before.
    """

    line: str
    first_contact: bool

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint, `SHA256:...`, as shown by `ssh-keygen -l`."""
        return fingerprint(self.line)


def fingerprint(line: str) -> str:
    """Return the SHA256 fingerprint of a public key line. Raises `BadRequest` if the line is not a public key."""
    try:
        blob = base64.b64decode(line.split()[1], validate=True)
    except (IndexError, ValueError):
        raise BadRequest(f"{line[:80]!r} is not a public key", "Expected `type base64`.") from None
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def public_key(blob: bytes) -> str:
    """Convert a public key from wire format to a line in OpenSSH's format. A certificate yields its certified key.

    Raises `ValueError` for other data.
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
    """Return the first length-prefixed field and the remaining bytes."""
    end = 4 + int.from_bytes(data[:4], "big")
    if len(data) < max(end, 4):
        raise ValueError("the public key is truncated")
    return data[4:end], data[end:]


# ------------------------------------------------------------------------------------------------------- known_hosts


@dataclass(frozen=True)
class KnownKeys:
    """A host's accepted and revoked keys, as `type base64`. `certified` is true if a @cert-authority line matches."""

    listed: tuple[str, ...]
    revoked: frozenset[str]
    certified: bool
    pinned: bool

    def judge(self, endpoint: Endpoint, seen: str, *, certificates: bool = True) -> HostKeyChanged | None:
        """Return the error for a key that is not accepted, or None for a listed key or an unknown key on first contact.

        `certificates` is true if the client checks host certificates.
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
    """Read the entries for one host in the user's known_hosts files.

    Raises `BadRequest` for an unreadable file or an invalid pin.
    """
    entries = [found for path in endpoint.known_hosts for found in _entries(path, endpoint.known_as)]
    revoked = frozenset(key for marker, key in entries if marker == REVOKED)
    if pin:
        fingerprint(pin)
        pin = " ".join(pin.split()[:2])
    listed = [pin] if pin else [key for marker, key in entries if not marker and key not in revoked]
    return KnownKeys(tuple(listed), revoked, not pin and any(m == CERTIFIED for m, _ in entries), bool(pin))


def _entries(path: str, host: str) -> Iterator[tuple[str, str]]:
    """Yield the marker and key of each line in a known_hosts file that matches `host`. Invalid lines are skipped."""
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
        # An authority whose pattern matches all hosts is not treated as an entry for this host.
        patterns = [p for p in words[0].split(",") if marker != CERTIFIED or p.strip("*?[]:")]
        if _is_about(patterns, host):
            yield marker, f"{words[1]} {words[2]}"


def _is_about(patterns: Sequence[str], host: str) -> bool:
    """Return whether a line's host patterns match this host, as described in sshd(8).

    A pattern can be hashed, or contain `*`, `?` and `!`.
    """
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
