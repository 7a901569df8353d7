"""Read SentencePiece tokenizer models: a protobuf with pieces and their scores, without any checksum."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits
from gpuwarden.checkpoints.protobuf import Walker
from gpuwarden.checkpoints.safe_file import Source

NAME = "sentencepiece"
LOAD = "parsed"
_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "spm.model")


def claims(name: str, head: bytes) -> bool:
    """Return true for the usual names of tokenizer files. Other programs also use the extension .model."""
    return name in _NAMES or name.endswith(".spm")


def read(source: Source, limits: Limits) -> Anatomy:
    """Check that every piece is valid UTF-8, and that the fields fill the complete file."""
    found = Anatomy(NAME)
    walker, pieces = Walker(source), 0
    for number, _, place in walker.fields(0, source.size):
        if number == 1 and isinstance(place, tuple):
            begin, end = next((p for n, _, p in walker.fields(*place) if n == 1 and isinstance(p, tuple)), (0, 0))
            try:
                source.at(begin, end - begin).decode("utf-8")
            except UnicodeDecodeError as why:
                raise Broken(f"piece {pieces + 1:,} is not valid UTF-8") from why
            pieces += 1
    if not pieces:
        raise Broken("has no pieces")
    found.proved.append(f"has {pieces:,} pieces, and its fields fill the complete file")
    return found
