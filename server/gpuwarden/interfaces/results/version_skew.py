"""Reply about a name that the installed release lacks: the releases that have it, and a requirement for one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from gpuwarden.core.sanitize import line

if TYPE_CHECKING:
    from gpuwarden.knowledge.version_skew import Skew


class SkewReply(BaseModel):
    """Releases of `package` that have `name`: from `since` to `until`. `pin` is a requirement for one of them."""

    package: str
    name: str
    kind: str
    change: str
    """removed, added, outside (added and later removed; the installed release is unknown), required, present (in the
    installed release or in every release) or never.
    """
    certainty: str
    since: str = ""
    until: str = ""
    gone_in: str = ""
    renamed_to: str = ""
    installed: str = ""
    pin: str = ""


def skew_reply(skew: Skew | None) -> SkewReply | None:
    """Return the reply about a version skew, with all strings sanitized and shortened."""
    if skew is None:
        return None
    return SkewReply(**{name: line(value, 200) for name, value in skew.model_dump(mode="json").items()})


def sentence_of(reply: SkewReply) -> str:
    """Return a version skew as one sentence for a terminal."""
    from gpuwarden.knowledge.version_skew import Change

    facts = {
        Change.REMOVED: f"exists up to {reply.package} {reply.until}, not in {reply.gone_in}",
        Change.ADDED: f"is available since {reply.package} {reply.since}",
        Change.OUTSIDE: f"exists from {reply.package} {reply.since} to {reply.until}",
        Change.REQUIRED: f"is required since {reply.package} {reply.gone_in}",
        Change.PRESENT: f"should exist in the installed release of {reply.package}: the installation may be broken",
        Change.NEVER: f"does not exist in any release of {reply.package}",
    }
    parts = [f"{reply.name} {facts[Change(reply.change)]}"]
    parts += [f"installed: {reply.installed}"] if reply.installed else []
    parts += [f"instead: {reply.renamed_to}"] if reply.renamed_to else []
    parts += [f"or install: {reply.pin}"] if reply.pin else []
    return "; ".join(parts)
