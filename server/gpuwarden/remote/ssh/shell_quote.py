"""Quote argument lists for a remote shell. This module builds all remote command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuwarden.core.errors import BadRequest

# Linux limits a single argument to 128 KiB, and sshd passes the whole line to the shell as one argument.
MAX_LINE_BYTES = 120_000

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
# Print the command's pid after any output from a login shell's rc file, then exec the command.
_ANNOUNCE = r"""printf "\n%s %s\n" "$0" "$$"; exec "$@" """.strip()


def quote(word: str) -> str:
    """Quote a word so that sh, bash, zsh, dash, ksh and fish read it unchanged.

    Backslashes are placed outside the single quotes, because fish interprets backslashes inside single quotes.
    """
    if _SAFE.fullmatch(word):
        return word
    return "'" + re.sub(r"['\\]", lambda match: f"'\\{match[0]}'", word) + "'"


def command_line(argv: Sequence[str], mark: str) -> bytes:
    """Return a command line for any login shell. It prints `mark` and the pid on one line, then runs `argv`.

    Lone surrogates represent bytes that are not UTF-8, as in Python's file names. Raises `BadRequest` for arguments
    that a command line can't contain.
    """
    if not argv or not argv[0]:
        raise BadRequest("the command is empty", "Pass at least a program name.")
    if any("\0" in word for word in argv):
        raise BadRequest("an argument contains a NUL character; command lines can't contain one", "Send it on stdin.")
    words = ["/bin/sh", "-c", _ANNOUNCE, mark, *argv]
    line = ("exec " + " ".join(map(quote, words))).encode("utf-8", "surrogateescape")
    if len(line) > MAX_LINE_BYTES:
        raise BadRequest(f"the command has {len(line):,} bytes; the limit is {MAX_LINE_BYTES:,}", "Send it on stdin.")
    return line
