"""Match paths with globs, braces or unknown parts against protected paths. The result is a `MatchCertainty`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final

from gpuwarden.interfaces.hooks.guard.printing import UNKNOWN, alternatives

MOST_SPELLINGS: Final = 100
MOST_NAME: Final = 255
_SPECIAL: Final = re.compile(rf"[*?\[{UNKNOWN}]")
_SEVERAL: Final = re.compile(rf"[\n{{{UNKNOWN}]")
_BRACES: Final = re.compile(r"\{([^{},]*,[^{}]*)\}")
_NESTED: Final = re.compile(r"(?<=[{,])([^{},]*)\{([^{},]*,[^{}]*)\}([^{},]*)(?=[,}])")
MOST_NESTED: Final = 4096
"""Maximum length, in characters, of text that is checked for nested braces."""
MOST_BRACED: Final = 200_000
_RANGE: Final = re.compile(r"\{[\w-]+\.\.[\w.-]+\}")


class MatchCertainty(IntEnum):
    """Certainty that two paths match."""

    NEVER = 0
    MAYBE = 1
    SURELY = 2


def spellings(text: str) -> Iterator[tuple[str, MatchCertainty]]:
    """Yield the patterns that one word represents, each with the highest certainty that a match can have.

    A loop variable may have several lines, braces expand to several words, and a program's output is one of several
    alternatives.
    """
    if not _SEVERAL.search(text):
        yield text, MatchCertainty.SURELY
        return
    lines = text.split("\n")
    words = [word for line in lines[:MOST_SPELLINGS] for word in braced(_RANGE.sub("*", line))]
    for word in words[:MOST_SPELLINGS]:
        options = alternatives(word)
        yield from ((each, MatchCertainty.SURELY if options == [word] else MatchCertainty.MAYBE) for each in options)
    if max(len(lines), len(words)) > MOST_SPELLINGS:
        yield UNKNOWN, MatchCertainty.MAYBE


def braced(text: str) -> list[str]:
    """Return the words of a brace expansion. If there are more than `MOST_SPELLINGS`, some are omitted."""
    while len(text) < MOST_NESTED and (found := _NESTED.search(text)):  # `{a,x{b,c}}` is `{a,xb,xc}`
        each = ",".join(found[1] + word + found[3] for word in found[2].split(",")[:MOST_SPELLINGS])
        text = text[: found.start()] + each + text[found.end() :]
    words = [text]
    while len(words) < MOST_SPELLINGS and len(words) * len(words[0]) < MOST_BRACED:
        if (found := _BRACES.search(words[0])) is None:
            break
        parts = found[1].split(",")[: MOST_SPELLINGS + 1]
        words = [w.replace(found[0], each, 1) for w in words for each in parts]
    return words


def is_pattern(place: str) -> bool:
    """Return whether a path may match several paths."""
    return _SPECIAL.search(place) is not None


def touches(place: str, kept: str) -> MatchCertainty:
    """Return the certainty that a path is the protected path `kept`, a parent folder of it, or inside it."""
    place = place.rstrip("/")
    if not is_pattern(place):
        near = place in {"", kept} or kept.startswith(place + "/") or place.startswith(kept + "/")
        return MatchCertainty.SURELY if near else MatchCertainty.NEVER
    for part, name in zip(place.split("/"), kept.split("/"), strict=False):
        if (at := part.find(UNKNOWN)) >= 0:
            return MatchCertainty.MAYBE if fnmatchcase(name, part[:at] + "*") else MatchCertainty.NEVER
        if part == "**":
            break
        if len(part) > MOST_NAME:
            return MatchCertainty.MAYBE
        if part != name and not fnmatchcase(name, part):
            return MatchCertainty.NEVER
    return MatchCertainty.SURELY


def is_in(place: str, kept: str) -> MatchCertainty:
    """Return the certainty that a path is the protected path `kept`, is inside it, or starts with it and a hyphen."""
    if not is_pattern(place):
        return (
            MatchCertainty.SURELY
            if place == kept or place.startswith((kept + "-", kept + "/"))
            else MatchCertainty.NEVER
        )
    found = touches(place, kept)
    parts = place.split("/")
    if found is MatchCertainty.SURELY and "**" in parts:
        fits = parts[-1] == "**" or fnmatchcase(kept.rpartition("/")[2], parts[-1])
        return found if fits else MatchCertainty.NEVER
    return MatchCertainty.NEVER if found is MatchCertainty.SURELY and len(parts) < kept.count("/") + 1 else found


def around(place: str, kept: str) -> bool:
    """Return whether a path is certainly a parent folder of the protected path `kept`."""
    return touches(place, kept) is MatchCertainty.SURELY and is_in(place, kept) is MatchCertainty.NEVER
