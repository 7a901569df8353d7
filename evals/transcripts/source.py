"""Read a transcript file once, within limits. Invalid content never raises; errors are recorded as problems."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

from evals.transcripts.canonical import Problem

MAX_FILE = 256 << 20
_TOO_LARGE = f"has more than {MAX_FILE >> 20} MiB, the maximum"
MAX_LINE = 32 << 20
ZIP = b"PK\x03\x04"
_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
_FIRST_LINE = re.compile(rf"\S[^\n]{{0,{MAX_LINE}}}")
_SECOND_LINE = re.compile(r"\S[^\n]*\n\s*\S")
_DECODE = json.JSONDecoder().raw_decode  # faster than json.loads, because white space around the value is not skipped


class Source:
    """The bytes of one file as JSON lines (`rows`) or as one JSON document (`document`)."""

    def __init__(self, path: Path, *, bare: str | None = None) -> None:
        """Open a source. `bare` is the server of the tools whose names do not contain a server."""
        self.path = path
        self.bare = bare
        self.problems: list[Problem] = []
        self.data = self._read()

    def _read(self) -> bytes:
        """Return the file's bytes, decompressed if the file is gzip; empty if the file is unreadable or too large."""
        try:
            size = self.path.stat().st_size
            if size > MAX_FILE:
                return self._refuse(_TOO_LARGE)
            with self.path.open("rb") as file:
                # `read` allocates as many bytes as requested; requesting the file's size keeps small files cheap.
                data = file.read(size + 1)
            if data.startswith(_ZSTD):
                return self._refuse("is compressed with zstd; unpack it first: zstd -d FILE")
            if data.startswith(_GZIP):
                with gzip.open(self.path) as unpacked:
                    data = unpacked.read(MAX_FILE + 1)
        except (OSError, EOFError, zlib.error) as error:
            return self._refuse(f"can't be read: {error}")
        if len(data) > MAX_FILE:
            return self._refuse(_TOO_LARGE)
        return data

    def _refuse(self, text: str) -> bytes:
        self._problem(text)
        return b""

    @cached_property
    def text(self) -> str:
        """Return the whole file as text, or an empty string for an archive. Bytes that are not UTF-8 are recorded as a
        problem.
        """
        if self.data.startswith(ZIP):
            return ""
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = self.data.count(b"\n", 0, error.start) + 1
            self._problem("bytes that are not UTF-8", line)
            return self.data.decode("utf-8", "replace")

    @cached_property
    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Return (line number, object) for every JSON line; other lines are recorded as problems."""
        rows = []
        for number, line in enumerate(self.text.split("\n"), 1):
            if not line or line.isspace():
                continue
            if len(line) > MAX_LINE:
                self._bad_line(number, f"a line of {len(line):,} characters")
                continue
            text = line.lstrip()
            try:
                row, end = _DECODE(text)
                if end != len(text) and not text[end:].isspace():
                    raise ValueError("more than one value")
            except (ValueError, RecursionError) as error:
                self._bad_line(number, f"not JSON ({type(error).__name__}): {text[:80]!r}")
                continue
            if isinstance(row, dict):
                rows.append((number, row))
            else:
                self._bad_line(number, f"a JSON {type(row).__name__} instead of an object")
        return rows

    def _bad_line(self, number: int, text: str) -> None:
        if len(self.problems) < 50:
            self._problem(text, number)

    def _problem(self, text: str, line: int = 0) -> None:
        self.problems.append(Problem("unreadable", text, line, self.path.name))

    @cached_property
    def document(self) -> Any:
        """Return the file as one JSON value, or None if it is not a single value (JSON lines, for example)."""
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def head(self) -> dict[str, Any]:
        """Return the first line as an object, or {}. The other lines are not parsed, because this is used to detect
        formats.
        """
        found = _FIRST_LINE.search(self.text)  # copies only the first line, because the file may be large
        try:
            row = json.loads(found[0] if found else "")
        except (ValueError, RecursionError):
            return {}
        return row if isinstance(row, dict) else {}

    @cached_property
    def shape(self) -> Any:
        """Return the content that identifies a format: the document if the file is one, otherwise the rows."""
        if self.head and _SECOND_LINE.search(self.text):
            return [row for _, row in self.rows]
        return self.document
