"""Limit how much of a text the guard reads: what needs more is stopped, for a guard that hangs lets everything pass."""

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
"""Linux runs no shell with a longer text: it is the limit of one argument."""
MOST_STEPS = 50_000
MOST_VALUE = 100_000
MOST_LOOKS = 10_000
"""How often the parser may report, which it does once in a hundred of its own steps."""
MOST_MARKS = 6_000
MOST_PIPES = 1_000
MOST_HEREDOCS = 300
"""The parser's time grows with the square of marks that it can't make sense of."""
DEEPEST = 40
_MARK = re.compile(r"[|&;<>(){}$`=\[\]!]|case|if|for|while|until|select|do|then|el|fi|esac|function")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(['\"\\]?)(\w+)")
_ODD_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*(?:\S*|'[^'\n]*|\"[^\"\n]*)[\U00010000-\U0010ffff]")
_BEYOND = re.compile(rb"[\xf0-\xf4][\x80-\xbf]{3}")


class TooMuch(Exception):
    """The text is too long, too deep or too tangled to be read in time."""


class Budget:
    """Counts steps over all texts of one call. Raises TooMuch when they are spent."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps away."""
        self.left -= steps
        if self.left < 0:
            raise TooMuch("the command has too many parts to be read")


def parsed(data: bytes) -> Tree:
    """Parse a text. Raises TooMuch when the parser takes too many steps: its own, so no machine is kinder."""
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    looks = count(1)
    # The grammar looks up a character beyond U+FFFF outside of the C library's tables, and may crash there.
    data = _BEYOND.sub(_two_for_one, data)
    try:
        return parser.parse(
            lambda at, _: data[at : at + 4096], progress_callback=lambda _at, _error: next(looks) > MOST_LOOKS
        )
    except ValueError as error:
        raise TooMuch("the command is too tangled to be read") from error


def _two_for_one(beyond: re.Match[bytes]) -> bytes:
    """Return two characters for one beyond U+FFFF, in as many bytes; each has two of its own."""
    code = ord(beyond[0].decode()) - 0x10000
    return (chr(0x400 + (code >> 10)) + chr(0x400 + (code & 0x3FF))).encode()


def check_marks(text: str) -> None:
    """Raise TooMuch when a text has more marks of the shell, outside here-documents, than any command needs.

    Nor may a here-document end at a word that the parser reads as another one.
    """
    if _ODD_HEREDOC.search(text):
        raise TooMuch("a here-document ends at a word of odd characters")
    if text.count("<<") <= MOST_HEREDOCS:
        if _few_marks(text):
            return
        kept, starts = _without_bodies(text)
        if _few_marks(kept) and starts <= _heredocs(kept):
            return
    raise TooMuch("the command has too many marks of the shell to be read")


def _few_marks(text: str) -> bool:
    return text.count("|") <= MOST_PIPES and sum(1 for _ in _MARK.finditer(text)) <= MOST_MARKS


def _without_bodies(text: str) -> tuple[str, set[int]]:
    """Return a text without what looks like the bodies of its here-documents, and the lines that begin these.

    A body that the shell expands is left where it is.
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
    """Return the first of sorted numbers that is at least so large."""
    at = bisect_left(numbers, least)
    return numbers[at] if at < len(numbers) else None


def _heredocs(text: str) -> set[int]:
    """Return the lines on which the parser, too, sees here-documents begin; none in a text that it can't read."""
    root = parsed(text.encode("utf-8", "replace")).root_node
    nodes, lines = [] if root.has_error else [root], set()
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.type == "heredoc_redirect":
            lines.add(node.start_point[0])
    return lines
