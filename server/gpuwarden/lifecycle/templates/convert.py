"""Convert a file's rows into a new file for a bundled trainer, and show rows before and after the conversion.

Rows that can't be converted are skipped and counted; the first few are listed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest, DiskError
from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.templates.forms import BadRow, for_method, plain_form
from gpuwarden.lifecycle.templates.json_rows import Row
from gpuwarden.static_analysis.shipped_trainers import Trainer

SHOWN: Final = 3
NAMED: Final = 5


@dataclass
class Conversion:
    """The outcome of a conversion: the number of rows read, written and skipped, their forms, and some examples."""

    read: int = 0
    written: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    shown: list[tuple[Row, tuple[Row, ...]]] = field(default_factory=list)


def convert(rows: Iterable[Row], to: Trainer, renames: Mapping[str, str], done: Conversion) -> Iterator[Row]:
    """Yield rows in the form that a trainer reads, and record the outcome in `done`."""
    for number, row in enumerate(rows, 1):
        done.read += 1
        named = {renames.get(name, name): value for name, value in row.items()}
        try:
            form, plain = plain_form(named)
            made = writable(for_method(plain, to))
        except BadRow as problem:
            done.left_out[str(problem)] += 1
            if len(done.named) < NAMED:
                done.named.append(f"row {number}: {problem}")
            continue
        done.forms[form] += 1
        done.written += len(made)
        if len(done.shown) < SHOWN:
            done.shown.append((row, made))
        yield from made


def writable(rows: Iterator[Row]) -> tuple[Row, ...]:
    """Return the rows. Raises BadRow if a row can't be encoded as UTF-8, which is possible because JSON allows lone
    surrogates.
    """
    made = tuple(rows)
    try:
        json.dumps(made, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRow("text or a file name in the row is not valid Unicode") from None
    return made


def write_rows(rows: Iterator[Row], file: Path, done: Conversion) -> None:
    """Write converted rows to a new jsonl file; remove the file if no row could be converted.

    Raises:
        BadRequest: the file exists, or no row could be converted.

    """
    try:
        stream = file.open("x", encoding="utf-8")
    except FileExistsError:
        raise BadRequest(f"{file} exists; nothing was written", "Choose another name, or move that file.") from None
    except OSError as error:
        raise DiskError.of(error) from error
    try:
        with stream:
            for row in rows:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    except BaseException as error:
        file.unlink()
        if isinstance(error, OSError):
            raise DiskError.of(error) from error
        raise
    if not done.written:
        file.unlink()
        need_some(done)


def need_some(done: Conversion) -> None:
    """Raise BadRequest if no row could be converted."""
    if not done.written:
        why = "; ".join(f"{reason} ({count})" for reason, count in done.left_out.most_common(3)) or "there are no rows"
        raise BadRequest(
            f"none of the {done.read} rows could be converted: {line(why, 400)}",
            "Choose another template, or rename the columns to the names that the template needs.",
        )


def preview(rows: Iterator[Row]) -> None:
    """Convert a few rows as examples, without writing them."""
    for _ in islice(rows, SHOWN):
        pass
