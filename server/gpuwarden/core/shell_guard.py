"""Declare the commands in a platform's own tools that end billed resources, for the guard in an agent's shell.

A sequence is a string of steps that follow a program's name. A step is one word, or several with `|` between them; `*`
matches any one word. A step that starts with `-` is an option that must be present anywhere; a step that starts with
`!-` is an option that must be absent. Words and options between the steps are skipped, as in a command line parser.

    ShellGuard(ends={"vastai": ("destroy", "stop"), "sky": ("jobs cancel", "serve down")})
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShellGuard:
    """The commands and API calls of one platform that the guard checks. Raises ValueError for an invalid pattern."""

    ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each program, the sequences that end, stop or delete a resource. An empty sequence matches every call."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for a program."""
    remote: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each program, the sequences that are followed by a command for the rented machine."""
    hosts: tuple[str, ...] = ()
    """Host names of the platform's API; each includes its subdomains."""
    paths: tuple[str, ...] = ()
    """Regular expressions for the URLs of an API that each site serves under its own host name."""
    requests: tuple[str, ...] = ()
    """Regular expressions for the URL and body of requests that end a machine, other than DELETE requests.

    Read-only requests never match.
    """
    code: tuple[str, ...] = ()
    """Regular expressions for code in Python or JavaScript: calls to the platform's library that end a machine."""
    servers: tuple[str, ...] = ()
    """Words in the name of an MCP server for this platform."""

    def __post_init__(self) -> None:
        for pattern in (*self.paths, *self.requests, *self.code):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        for program in (*self.ends, *self.aliases, *self.remote):
            if not re.fullmatch(r"[a-z0-9._-]+", program):
                raise ValueError(f"{program!r} is not a lowercase program name")

    def table(self) -> dict[str, Any]:
        """Return the declaration as plain values, for a JSON file."""
        return asdict(self)


def merged(guards: list[ShellGuard]) -> ShellGuard:
    """Return the union of several declarations; sequences for the same program are combined."""

    def maps(name: str) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for guard in guards:
            for program, sequences in getattr(guard, name).items():
                found[program] = tuple(dict.fromkeys((*found.get(program, ()), *sequences)))
        return found

    def texts(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for guard in guards for text in getattr(guard, name)))

    return ShellGuard(
        ends=maps("ends"),
        aliases={other: program for guard in guards for other, program in guard.aliases.items()},
        remote=maps("remote"),
        hosts=texts("hosts"),
        paths=texts("paths"),
        requests=texts("requests"),
        code=texts("code"),
        servers=texts("servers"),
    )
