"""Tokens, one-time links and browser sessions, stored as digests next to the ledger.

A secret is 32 random bytes, so it can't be recovered from its plain SHA-256 digest. The file has mode 0600 and is read
again whenever it changes, so a revoked token is refused from the next request on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from filelock import FileLock
from pydantic import ValidationError

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, Conflict, DiskError, NotFound
from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.http.principals import Principal, Scope
from gpuwarden.private import private_folder, write_private

FILE: Final = "access.json"
Kind = Literal["token", "link", "session"]
PREFIXES: Final[dict[Kind, str]] = {"token": "gwt", "link": "gwl", "session": "gws"}
DAY_S: Final = 86_400.0
LINK_S: Final = 120.0
SESSION_S: Final = 12 * 3_600.0
MAX_DAYS: Final = 366
MAX_TOKENS: Final = 200
MAX_SESSIONS: Final = 50
"""Maximum number of browser sessions; a new one replaces the oldest."""
MAX_SECRET: Final = 256


class Grant(Frozen):
    """One stored secret: its SHA-256 digest, scopes and lifetime. `created_at` and `expires_at` are Unix seconds."""

    id: str
    kind: Kind
    name: str
    scopes: tuple[Scope, ...]
    digest: str
    created_at: float
    expires_at: float
    person: str = ""
    """The user on whose behalf the grant acts. Empty for a token from an older version; such a token acts under its own
    name.
    """


class _File(Frozen):
    grants: tuple[Grant, ...] = ()


class TokenStore:
    """The grants of one state folder. Several processes may read and change them."""

    def __init__(self, home: Path, clock: Clock) -> None:
        self.home = home
        self.clock = clock
        self._file = home / FILE
        self._stamp: tuple[int, int, int] | None = None
        self._grants: tuple[Grant, ...] = ()

    def create(self, name: str, scopes: Sequence[Scope], days: float, person: str = "") -> tuple[Grant, str]:
        """Store a new token.

        Return its grant and its secret; only a digest of the secret is stored. Raises BadRequest, Conflict.
        """
        for given in (name, person or name):
            if not given.strip() or line(given, 64) != given or len(given) > 64:
                raise BadRequest("a name is empty, is longer than 64 characters, or contains unsupported characters")
        if not scopes or not 0 < days <= MAX_DAYS:
            raise BadRequest(f"a token needs at least one scope and a lifetime of at most {MAX_DAYS} days")
        return self._add("token", name, tuple(dict.fromkeys(scopes)), days * DAY_S, person)

    def create_link(self, person: str = "") -> str:
        """Create a one-time link, which opens one browser session for a user, and return its secret."""
        return self._add("link", "dashboard", (), LINK_S, person)[1]

    def open_session(self, link: str) -> str | None:
        """Use up a one-time link. Return the secret of the session that it opens; None for an invalid link.

        The lock is taken only for a valid link, because any web page can send this request, and its guesses must not
        block other requests.
        """
        if self._find(link, self._read()) is None:
            return None
        with self._changing() as grants:
            found = self._find(link, grants)
            if found is None or found.kind != "link":
                return None
            grants.remove(found)
        return self._add("session", "browser", ("read",), SESSION_S, found.person)[1]

    def listed(self) -> list[Grant]:
        """Return the valid tokens, oldest first."""
        now = self.clock.now()
        return [g for g in self._read() if g.kind == "token" and g.expires_at > now]

    def valid_ids(self) -> frozenset[str]:
        """Return the ids of the valid tokens and sessions. Raises DiskError."""
        now = self.clock.now()
        return frozenset(g.id for g in self._read() if g.kind != "link" and g.expires_at > now)

    def revoke(self, what: str) -> Grant:
        """Remove the token with this id or name. Raises NotFound."""
        with self._changing() as grants:
            for grant in grants:
                if grant.kind == "token" and what in {grant.id, grant.name}:
                    grants.remove(grant)
                    return grant
        raise NotFound(
            f"no token has the id or name {line(what, 64)!r}", "Run gpuwarden token list to list all tokens."
        )

    def close_session(self, session_id: str) -> None:
        """End one browser session."""
        with self._changing() as grants:
            grants[:] = [g for g in grants if g.kind != "session" or g.id != session_id]

    def principal(self, secret: str) -> Principal | None:
        """Return the principal for a token's or session's secret; None if the secret is unknown, expired or revoked."""
        found = self._find(secret, self._read())
        if found is None or found.kind == "link":
            return None
        person = found.person or (found.name if found.kind == "token" else "")
        return Principal(found.kind, found.id, found.name, frozenset(found.scopes), person=person)

    def _find(self, secret: str, grants: Sequence[Grant]) -> Grant | None:
        """Return the grant for a secret. The comparison time does not depend on the match's position."""
        if len(secret) > MAX_SECRET:
            return None
        digest, now = _digest(secret), self.clock.now()
        same = [g for g in grants if hmac.compare_digest(g.digest, digest)]
        return next((g for g in same if g.created_at - 60 <= now < g.expires_at), None)

    def _add(
        self, kind: Kind, name: str, scopes: tuple[Scope, ...], lasts_s: float, person: str = ""
    ) -> tuple[Grant, str]:
        secret = f"{PREFIXES[kind]}_{secrets.token_urlsafe(32)}"
        now = self.clock.now()
        grant = Grant(
            id=secrets.token_hex(4),
            kind=kind,
            name=name,
            scopes=scopes,
            digest=_digest(secret),
            created_at=now,
            expires_at=now + lasts_s,
            person=person,
        )
        with self._changing() as grants:
            alike = [g for g in grants if g.kind == kind]
            if kind == "token":
                if any(g.name == name for g in alike):
                    raise Conflict(f"a token named {name!r} exists", "Choose another name, or revoke that token first.")
                if len(alike) >= MAX_TOKENS:
                    raise Conflict(f"the limit of {len(alike)} tokens is reached", "Revoke unused tokens first.")
            elif len(alike) >= MAX_SESSIONS:
                grants.remove(alike[0])
            grants.append(grant)
        return grant, secret

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Grant]]:
        """Yield the unexpired grants under a lock, then store the changed list. Raises DiskError."""
        try:
            with FileLock(private_folder(self.home / "locks") / "access.lock", mode=0o600, timeout=30):
                now, before = self.clock.now(), self._read()
                grants = [g for g in before if g.expires_at > now]
                yield grants
                if tuple(grants) != before:
                    write_private(self._file, _File(grants=tuple(grants)).model_dump_json())
        except OSError as error:
            raise DiskError.of(error) from error

    def _read(self) -> tuple[Grant, ...]:
        """Return the grants in the file, which is parsed only after a change. Raises DiskError, which denies access."""
        try:
            info = self._file.stat()
            stamp = (info.st_mtime_ns, info.st_size, info.st_ino)
            if stamp != self._stamp:
                self._grants = _File.model_validate_json(self._file.read_bytes()).grants
                self._stamp = stamp
        except FileNotFoundError:
            self._grants, self._stamp = (), None
        except OSError as error:
            raise DiskError.of(error) from error
        except ValidationError as error:
            raise DiskError(
                f"the token file is invalid: {self._file}", "Delete the file, then create the tokens again."
            ) from error
        return self._grants


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
