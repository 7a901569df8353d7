"""Events for a script's rehearsal on this machine: the request, the user's consent, and the result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuwarden.ledger.events.base import Body


class RehearsalRequested(Body):
    """A rehearsal was requested. `digest` covers the script and its arguments, variables and inputs."""

    event: Literal["rehearsal.asked"] = "rehearsal.asked"
    digest: str
    name: str
    args: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    script_bytes: int = 0
    script_digest: str = ""
    start: str = ""


class RehearsalAllowed(Body):
    """The user allowed the rehearsal with this digest."""

    event: Literal["rehearsal.allowed"] = "rehearsal.allowed"
    digest: str
    channel: str
    by: str


class ScriptRehearsed(Body):
    """A script was rehearsed. `packages` is the digest of the installed packages.

    `outcome` is the result that the script's process reported: `passed`, `fault` or `stopped`.
    """

    event: Literal["script.rehearsed"] = "script.rehearsed"
    digest: str
    packages: str
    outcome: str
    certain: bool = False
    message: str = ""
    line: int = 0
    source: str = ""
    stopped_by: str = ""
    reached: tuple[str, ...] = ()
    substitutes: dict[str, str] = Field(default_factory=dict)
    steps: int = 0
    resumed: bool | None = None
    saved: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
