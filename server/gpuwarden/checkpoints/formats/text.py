"""Read plain text: logs, notes, tables, configs. The only check is that the text is valid UTF-8."""

from __future__ import annotations

import codecs

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Unread
from gpuwarden.checkpoints.safe_file import Source

NAME = "text"
LOAD = "parsed"
_ENDINGS = (
    ".txt", ".log", ".md", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".jinja", ".jinja2",
    ".out", ".err", ".tiktoken", ".py", ".sh", ".html", ".svg", ".model_card", ".gitattributes", ".gitignore",
)  # fmt: skip
_NAMES = ("stdout", "stderr", "log", "LICENSE", "README", "latest", "latest_checkpointed_iteration.txt")


def claims(name: str, head: bytes) -> bool:
    """Return true for text file names. The content is ignored, because other formats may also be ASCII."""
    return name.lower().endswith(_ENDINGS) or name in _NAMES


def read(source: Source, limits: Limits) -> Anatomy:
    """Decode the complete file. A truncated last character causes only a warning, because a log may end with one."""
    found = Anatomy(NAME)
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = at = 0
    while at < source.size:
        piece = source.at(at, min(1 << 20, source.size - at))
        if b"\0" in piece:
            raise Broken(f"has a NUL byte at byte {at + piece.index(0):,}: a crash probably left a hole in the file")
        try:
            decoder.decode(piece)
        except UnicodeDecodeError as why:
            raise Unread(f"is not UTF-8 near byte {at + why.start:,}") from why
        lines += piece.count(b"\n")
        at += len(piece)
    if decoder.getstate()[0]:
        found.warnings.append("its last character is truncated")
    found.proved.append(f"is valid UTF-8 text, {lines:,} lines")
    return found
