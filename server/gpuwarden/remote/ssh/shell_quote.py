"""The one place where an argument list becomes a line for a far shell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpuwarden.core.errors import BadRequest

# Linux gives one argument at most 128 KiB, and sshd hands the whole line to the shell as one argument.
MAX_LINE_BYTES = 120_000

_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+", re.ASCII)
# Announces the command's pid after whatever a login shell's rc file printed, then becomes the command.
_ANNOUNCE = r"""printf "\n%s %s\n" "$0" "$$"; exec "$@" """.strip()


def quote(word: str) -> str:
    """Return one word, as sh, bash, zsh, dash, ksh and fish all read it back unchanged.

    Backslashes stand outside the single quotes because fish interprets them inside.
    """
    if _SAFE.fullmatch(word):
        return word
    return "'" + re.sub(r"['\\]", lambda match: f"'\\{match[0]}'", word) + "'"


def command_line(argv: Sequence[str], mark: str) -> bytes:
    """Return the line that runs `argv` under any login shell and prints `mark` and the pid on a line of its own before
    it.

    Lone surrogates stand for bytes that are no UTF-8, as Python names files. Raises `BadRequest` for what no
    command line can hold.
    """
    if not argv or not argv[0]:
        raise BadRequest("there is no command", "Give at least one word.")
    if any("\0" in word for word in argv):
        raise BadRequest("an argument holds a NUL character, which no command line can hold", "Send it on stdin.")
    words = ["/bin/sh", "-c", _ANNOUNCE, mark, *argv]
    line = ("exec " + " ".join(map(quote, words))).encode("utf-8", "surrogateescape")
    if len(line) > MAX_LINE_BYTES:
        raise BadRequest(f"the command has {len(line):,} bytes; the limit is {MAX_LINE_BYTES:,}", "Send it on stdin.")
    return line
