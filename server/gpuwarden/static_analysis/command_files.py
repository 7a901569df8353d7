"""Find the files in a command line: the script that an interpreter starts, and data and settings files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_INTERPRETER: Final = re.compile(r"python[\d.]*|bash|sh|zsh|dash")
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "deepspeed", "uv", "composer", "colossalai"})
_WITH_VALUE: Final = frozenset({"-W", "-X", "-o", "-O"})
_NO_FILE: Final = frozenset({"-m", "-c"})
_DATA: Final = re.compile(r"[^\s:*?$]+\.(jsonl?|csv|tsv|parquet|ya?ml|toml|txt|py|sh)")


def is_python(program: str) -> bool:
    """Return true if a program is a Python interpreter, judging by its name."""
    return re.fullmatch(r"python[\d.]*", program.rpartition("/")[2]) is not None


def started_file(command: Sequence[str]) -> str:
    """Return the file that a command's interpreter or launcher starts; empty if it can't be determined."""
    program, words = command[0].rpartition("/")[2] if command else "", list(command[1:])
    if program in _LAUNCHERS:
        return next((w for w in words if w.endswith(".py") and not w.startswith("-") and "://" not in w), "")
    if _INTERPRETER.fullmatch(program) is None:
        return ""
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in _NO_FILE or (len(word) > 1 and word[1] != "-" and word[-1] in "mc"):
            return ""
        if word in _WITH_VALUE and words:
            words.pop(0)
    return words[0] if words else ""


def named_files(words: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, including the values in `--name=value`, that look like data, settings or code files."""
    for word in words:
        value = word.partition("=")[2] if word.startswith("-") else word
        if _DATA.fullmatch(value) and "://" not in value:
            yield value
