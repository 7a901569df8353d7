"""Limit how much of a text the guard reads: what needs more is stopped, for a guard that hangs lets everything pass."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import tree_sitter
import tree_sitter_bash

if TYPE_CHECKING:
    from tree_sitter import Tree

MOST_BYTES = 131_072
"""Linux runs no shell with a longer text: it is the limit of one argument."""
MOST_STEPS = 30_000
MOST_VALUE = 100_000
MOST_PARSE_S = 0.06
MOST_MARKS = 6_000
MOST_PIPES = 1_000
MOST_HEREDOCS = 300
"""The parser's time grows with the square of marks that it can't make sense of."""
DEEPEST = 40
_HEREDOC = re.compile(r"<<-?[ \t]*['\"\\]?(\w+)")
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
    """Parse a text. Raises TooMuch when the parser needs too long, counted in its own time on the processor."""
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    end = time.process_time() + MOST_PARSE_S
    # The grammar looks up a character beyond U+FFFF outside of the C library's tables, and may crash there.
    data = _BEYOND.sub(_two_for_one, data)
    try:
        return parser.parse(
            lambda at, _: data[at : at + 4096], progress_callback=lambda _at, _error: time.process_time() > end
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
    end, outside = "", []
    for line in text.split("\n"):
        if not end:
            outside.append(line)
            found = _HEREDOC.search(line)
            end = found[1] if found else ""
        elif line.strip() == end:
            end = ""
    kept = "\n".join(outside)
    if (
        kept.count("|") > MOST_PIPES
        or text.count("<<") > MOST_HEREDOCS
        or sum(map(kept.count, "|&;<>(){}$`=")) > MOST_MARKS
    ):
        raise TooMuch("the command has too many marks of the shell to be read")
