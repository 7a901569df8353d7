"""Who sends a request, and what they may do.

Three kinds of principals: a `token` that a person made for a client, a browser `session` that a one-time link opened,
and a `job` that reports its own metrics and alerts. No scope approves anything: that needs a person.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from gpuwarden.job_tokens import job_of

Scope = Literal["read", "submit", "metrics", "alerts"]
"""`read` and `submit` belong to people's tokens; `metrics` and `alerts` to a job's own two keys."""
Kind = Literal["token", "session", "job"]
GRANTABLE: Final[tuple[Scope, ...]] = ("read", "submit")


@dataclass(frozen=True)
class Principal:
    """Sender of a request. `id` is unique among principals of a kind; `job_id` is set for a job only."""

    kind: Kind
    id: str
    name: str
    scopes: frozenset[Scope] = field(default_factory=frozenset)
    job_id: str | None = None
    person: str = ""
    """On whose behalf a token or a session acts."""


class Authority(Protocol):
    """Maps what a request presents to a principal."""

    def principal(self, secret: str) -> Principal | None:
        """Return who holds a secret; None for one that is unknown, expired or revoked."""
        ...


class JobAuthority:
    """Accept the two keys of a job: `JOB_TOKEN` as a bearer token and `INTERNAL_API_KEY`."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def principal(self, secret: str) -> Principal | None:
        """Return the job that a key belongs to. Whether the ledger has such a job is for the route to check."""
        found = job_of(self.home, secret)
        if found is None:
            return None
        job_id, purpose = found
        return Principal("job", job_id, job_id, frozenset({purpose}), job_id)
