"""Limit the guard's work per call. A call that exceeds a limit is blocked, because a client allows a call if the guard
hangs.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import tree_sitter
import tree_sitter_bash

if TYPE_CHECKING:
    from tree_sitter import Tree

MOST_BYTES = 131_072
"""Linux's limit on the size of one argument in bytes. It also limits the command that is passed to a shell."""
MOST_STEPS = 50_000
MOST_VALUE = 100_000
MOST_LOOKS = 10_000
"""Maximum number of progress callbacks from the parser. The parser calls back once per hundred steps."""
MOST_MARKS = 6_000
MOST_PIPES = 1_000
MOST_HEREDOCS = 300
"""These limits exist because parsing time grows quadratically with the number of unmatched operators and keywords."""
DEEPEST = 40
_MARK = re.compile(r"[|&;<>(){}$`=\[\]!]|case|if|for|while|until|select|do|then|el|fi|esac|function")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"\\]?)(\w+)")
_ODD_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(?:\S*|'[^'\n]*|\"[^\"\n]*)[\U00010000-\U0010ffff]")
_BEYOND = re.compile(rb"[\xf0-\xf4][\x80-\xbf]{3}")


class TooMuch(Exception):
    """The text is too long, too deeply nested or too complex to check in time."""


class Budget:
    """A limited number of steps for all commands in one call."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int = 1) -> None:
        """Deduct steps. Raises TooMuch if none are left."""
        self.left -= steps
        if self.left < 0:
            raise TooMuch("the command has too many parts to check")


def parsed(data: bytes) -> Tree:
    """Parse shell code. Raises TooMuch after too many steps, regardless of the machine's speed."""
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    looks = count(1)
    # The grammar may crash on characters beyond U+FFFF, because it looks them up outside the C library's tables.
    data = _BEYOND.sub(_two_for_one, data)
    try:
        return parser.parse(
            lambda at, _: data[at : at + 4096], progress_callback=lambda _at, _error: next(looks) > MOST_LOOKS
        )
    except ValueError as error:
        raise TooMuch("the command is too complex to check") from error


def _two_for_one(beyond: re.Match[bytes]) -> bytes:
    """Replace a character beyond U+FFFF with two characters of two bytes each, so that the length in bytes stays the
    same.
    """
    code = ord(beyond[0].decode()) - 0x10000
    return (chr(0x400 + (code >> 10)) + chr(0x400 + (code & 0x3FF))).encode()


def check_marks(text: str) -> None:
    """Raise TooMuch if a command has too many shell operators and keywords outside here-documents.

    Also raise it if the parser would misread a here-document's delimiter as a different word.
    """
    if _ODD_HEREDOC.search(text):
        raise TooMuch("a here-document's delimiter contains unsupported characters")
    if text.count("<<") <= MOST_HEREDOCS:
        if _few_marks(text):
            return
        kept, starts = _without_bodies(text)
        if _few_marks(kept) and starts <= _heredocs(kept):
            return
    raise TooMuch("the command has too many shell operators and keywords to check")


def _few_marks(text: str) -> bool:
    return text.count("|") <= MOST_PIPES and sum(1 for _ in _MARK.finditer(text)) <= MOST_MARKS


def _without_bodies(text: str) -> tuple[str, set[int]]:
    """Return the text without apparent here-document bodies, and the line numbers in the result at which they started.

    Bodies that the shell expands are kept.
    """
    lines = text.split("\n")
    ends: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        ends.setdefault(line.strip(), []).append(number)
    expanded = [number for number, line in enumerate(lines) if "$" in line or "`" in line]
    kept: list[str] = []
    starts: set[int] = set()
    at = 0
    while at < len(lines):
        kept.append(lines[at])
        found = _HEREDOC.search(lines[at])
        at += 1
        end = _first(ends.get(found[2], ()), at) if found else None
        if found and end is not None and (found[1] or (_first(expanded, at) or end) >= end):
            starts.add(len(kept) - 1)
            at = end
    return "\n".join(kept), starts


def _first(numbers: Sequence[int], least: int) -> int | None:
    """Return the first of the sorted numbers that is at least `least`."""
    at = bisect_left(numbers, least)
    return numbers[at] if at < len(numbers) else None


def _heredocs(text: str) -> set[int]:
    """Return the lines on which the parser finds the start of a here-document; none if the text has syntax errors."""
    root = parsed(text.encode("utf-8", "replace")).root_node
    nodes, lines = [] if root.has_error else [root], set()
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.type == "heredoc_redirect":
            lines.add(node.start_point[0])
    return lines
