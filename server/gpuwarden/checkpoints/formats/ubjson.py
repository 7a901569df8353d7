"""Read Universal Binary JSON (.ubj), XGBoost's model format: objects with typed arrays of big-endian numbers."""

from __future__ import annotations

import struct
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, Tensor, short
from gpuwarden.checkpoints.safe_file import Reader, Source
from gpuwarden.core.evidence import Cause

NAME = "ubjson"
LOAD = "parsed"
_DEPTH = 100
_NUMBERS = {b"i": "b", b"U": "B", b"I": "h", b"u": "H", b"l": "i", b"L": "q", b"d": "f", b"D": "d"}
_KINDS = {b"i": "I8", b"U": "U8", b"I": "I16", b"u": "U16", b"l": "I32", b"L": "I64", b"d": "F32", b"D": "F64"}
_WORDS = {b"Z": None, b"T": True, b"F": False}


def claims(name: str, head: bytes) -> bool:
    """Return true for file names with this format's extensions."""
    return name.endswith((".ubj", ".ubjson"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Read all values in the file, and compare a model's number of trees with the declared number."""
    walk = _Walk(Reader(source), limits)
    walk.found.big_endian = True
    root = walk.value(walk.code(), "", 0)
    if walk.reader.at != source.size:
        raise Broken(f"{source.size - walk.reader.at:,} bytes follow its top-level value")
    found = walk.found
    found.content = root
    found.proved.append(f"its values fill the file exactly; {len(found.tensors):,} of them are arrays")
    learner = root.get("learner") if isinstance(root, dict) else None
    booster = learner.get("gradient_booster") if isinstance(learner, dict) else None
    if isinstance(booster, dict) and isinstance(booster.get("gbtree"), dict):
        booster = booster["gbtree"]
    model = booster.get("model") if isinstance(booster, dict) else None
    params, trees = (model.get(k) if isinstance(model, dict) else None for k in ("gbtree_model_param", "trees"))
    if isinstance(params, dict) and isinstance(trees, list):
        stated = params.get("num_trees")
        if str(stated) == str(len(trees)):
            found.proved.append(f"has {len(trees):,} trees, as declared")
        else:
            found.refute(f"declares {short(stated, 20)} trees, but has {len(trees):,}", Cause.CONTRADICTION)
    return found


class _Walk:
    def __init__(self, reader: Reader, limits: Limits) -> None:
        self.reader, self.limits, self.found, self.count = reader, limits, Anatomy(NAME), 0

    def code(self) -> bytes:
        """Return the type of the next value, skipping no-op markers (N)."""
        code = self.reader.take(1)
        while code == b"N":
            code = self.reader.take(1)
        return code

    def number(self, code: bytes) -> Any:
        form = _NUMBERS.get(code)
        if form is None:
            raise Broken(f"has a number of an unknown type before byte {self.reader.at:,}")
        return struct.unpack(">" + form, self.reader.take(struct.calcsize(form)))[0]

    def length(self) -> int:
        length = self.number(self.code())
        if not isinstance(length, int) or not 0 <= length <= self.reader.end - self.reader.at:
            raise Broken(f"declares {length} values before byte {self.reader.at:,}, more than the file can contain")
        return length

    def value(self, code: bytes, name: str, depth: int) -> Any:
        """Return one value, or None for an array of numbers."""
        self.count += 1
        if self.count > self.limits.containers:
            raise Doubtful(f"has more than {self.limits.containers:,} values; the rest was not read", Cause.LIMIT)
        if depth > _DEPTH:
            raise Broken(f"is nested deeper than {_DEPTH} levels")
        if code in _NUMBERS:
            return self.number(code)
        if code in _WORDS:
            return _WORDS[code]
        if code in (b"S", b"H"):
            return self.text()
        if code == b"C":
            return self.reader.take(1).decode("latin-1")
        if code == b"[":
            return self.array(name, depth)
        if code == b"{":
            return self.object(name, depth)
        raise Broken(f"has a value of the unknown type {code!r} before byte {self.reader.at:,}")

    def text(self) -> str:
        length = self.length()
        if length > self.limits.header:
            raise Doubtful(f"has a string of {length:,} bytes", Cause.LIMIT)
        return self.reader.take(length).decode("utf-8", "replace")

    def array(self, name: str, depth: int) -> list[Any] | None:
        code, kind = self.code(), b""
        if code == b"$":
            kind, code = self.reader.take(1), self.reader.take(1)
            if code != b"#":
                raise Broken(f"has a typed array without a length before byte {self.reader.at:,}")
        if code == b"#":
            length = self.length()
            if kind in _NUMBERS:
                size = length * struct.calcsize(_NUMBERS[kind])
                self.found.tensors.append(Tensor(name, _KINDS[kind], (length,), self.reader.skip(size), size))
                return None
            return [self.value(kind or self.code(), f"{name}.{i}", depth + 1) for i in range(length)]
        made: list[Any] = []
        while code != b"]":
            made.append(self.value(code, f"{name}.{len(made)}", depth + 1))
            code = self.code()
        return made

    def object(self, name: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        code, kind, left = self.code(), b"", -1
        if code == b"$":
            kind, code = self.reader.take(1), self.reader.take(1)
        if code == b"#":
            left, code = self.length(), b""
        while left and code != b"}":
            if code:  # The type of the first key's length has already been read.
                size = self.number(code)
                key = self.reader.take(size if isinstance(size, int) else -1).decode("utf-8", "replace")
            else:
                key = self.text()
            if key in made:
                raise Broken(f"has the duplicate name {short(key, 60)}", Cause.CONTRADICTION)
            made[key] = self.value(kind or self.code(), f"{name}.{key}".lstrip("."), depth + 1)
            left -= 1
            code = b"" if left >= 0 else self.code()
        return made
