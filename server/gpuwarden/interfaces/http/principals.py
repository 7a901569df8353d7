"""Request senders and their scopes.

A principal is a `token` that the user created for a client, a browser `session` that a one-time link opened, or a
`job` that reports its own metrics and alerts. No scope permits an approval; only the user can approve.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from gpuwarden.job_tokens import job_of

Scope = Literal["read", "submit", "metrics", "alerts"]
"""`read` and `submit` are scopes for users' tokens; `metrics` and `alerts` are the scopes of a job's two keys."""
GRANTED: Final[frozenset[Scope]] = frozenset({"read", "submit"})
"""The scopes that the user, or the user's OAuth issuer, may grant to a client."""
Kind = Literal["token", "session", "job"]


@dataclass(frozen=True)
class Principal:
    """Sender of a request. `id` is unique within a kind; `job_id` is set for jobs only."""

    kind: Kind
    id: str
    name: str
    scopes: frozenset[Scope] = field(default_factory=frozenset)
    job_id: str | None = None
    person: str = ""
    """The user on whose behalf a token or a session acts."""


class Authority(Protocol):
    """Maps a request's secret to a principal."""

    def principal(self, secret: str) -> Principal | None:
        """Return the principal for a secret; None if the secret is unknown, expired or revoked."""
        ...


class JobAuthority:
    """Accepts the two keys of a job: `JOB_TOKEN` as a bearer token, and `INTERNAL_API_KEY`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def principal(self, secret: str) -> Principal | None:
        """Return the job that a key belongs to. The route checks whether the ledger has this job."""
        found = job_of(self.home, secret)
        if found is None:
            return None
        job_id, purpose = found
        return Principal("job", job_id, job_id, frozenset({purpose}), job_id)
