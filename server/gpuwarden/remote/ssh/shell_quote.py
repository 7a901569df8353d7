"""Quote argument lists for a remote shell; nothing else builds such lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuwarden.core.errors import BadRequest

# Linux gives one argument at most 128 KiB, and sshd hands the whole line to the shell as one argument.
MAX_LINE_BYTES = 120_000

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
# Prints the command's pid after any output of a login shell's rc file, then becomes the command.
_ANNOUNCE = r"""printf "\n%s %s\n" "$0" "$$"; exec "$@" """.strip()


def quote(word: str) -> str:
    """Return one quoted word, which sh, bash, zsh, dash, ksh and fish all read back unchanged.

    Backslashes are outside the single quotes because fish interprets them inside.
    """
    if _SAFE.fullmatch(word):
        return word
    return "'" + re.sub(r"['\\]", lambda match: f"'\\{match[0]}'", word) + "'"


def command_line(argv: Sequence[str], mark: str) -> bytes:
    """Return the line that runs `argv` under any login shell and prints `mark` and the pid on a separate line before
    it. Lone surrogates represent bytes that are not UTF-8, as in Python's file names. Raises `BadRequest` for arguments
    that no command line can contain.
    """
    if not argv or not argv[0]:
        raise BadRequest("the command is empty", "Give at least one word.")
    if any("\0" in word for word in argv):
        raise BadRequest("an argument contains a NUL character, which no command line can contain", "Send it on stdin.")
    words = ["/bin/sh", "-c", _ANNOUNCE, mark, *argv]
    line = ("exec " + " ".join(map(quote, words))).encode("utf-8", "surrogateescape")
    if len(line) > MAX_LINE_BYTES:
        raise BadRequest(f"the command has {len(line):,} bytes; the limit is {MAX_LINE_BYTES:,}", "Send it on stdin.")
    return line
