"""Export the ledger as JSON lines with hashes that other programs can check, and check an exported file.

Each line contains one event's columns, its interface and user, and its hash. The hash is the SHA-256 of a JSON list, in
ASCII and without spaces: the hash of the previous line (64 zeros for the first line), then `seq`, `at`, `subject`,
`kind`, `version`, `state`, `token`, `actor` and the text of the body. The body's text is JSON with a space after each
colon and comma. If the text was stored in another form, the line contains the stored form as `text`.

The hash does not cover `interface` and `person`. If the line has `text`, the hash does not cover `body` either. The
check derives these fields from the other fields and compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from gpuwarden.core.errors import BadRequest
from gpuwarden.ledger.chain import COLUMNS, GENESIS, Break, Head, Query, link
from gpuwarden.people import user_of

_NAMES: Final = tuple(COLUMNS.split(", "))


def export_lines(query: Query, after: int = 0) -> Iterator[str]:
    """Yield one line for each event with a number above `after`, in order."""
    sql = f"SELECT {COLUMNS}, hash FROM events WHERE seq > {after:d} ORDER BY seq"  # noqa: S608 - constants and a number
    for *row, kept in query(sql):
        yield json.dumps(_row_of(row, kept), ensure_ascii=False)


def _row_of(row: Sequence[Any], kept: str) -> dict[str, Any]:
    """Return the fields of one event's line. `row` has the columns in the order of `COLUMNS`."""
    fields: dict[str, Any] = dict(zip(_NAMES, row, strict=True))
    fields |= {"interface": fields["actor"].partition("/")[0], "person": user_of(fields["actor"])}
    text = fields.pop("body")
    try:
        fields["body"] = json.loads(text)
    except ValueError:
        fields["body"] = None
    if json.dumps(fields["body"], ensure_ascii=False) != text:
        fields["text"] = text
    return fields | {"hash": kept}


def check_lines(lines: Iterable[str]) -> tuple[Head | None, Break | None]:
    """Return the last valid event in an export and the first break in its hash chain, each None if there is none.

    The first line's hash can be checked only if the line is the ledger's first event. Raises BadRequest if the file is
    not an export.
    """
    last: Head | None = None
    for number, line in enumerate(lines, 1):
        try:
            fields = json.loads(line, object_pairs_hook=_once)
            text = fields["text"] if "text" in fields else json.dumps(fields["body"], ensure_ascii=False)
            row = (*(fields[name] for name in _NAMES[:-1]), text)
            seq, kept = int(fields["seq"]), str(fields["hash"])
            same = json.dumps(fields, sort_keys=True) == json.dumps(_row_of(row, kept), sort_keys=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadRequest(f"line {number} is not an exported event", "Export the ledger again.") from error
        if seq != (last.seq + 1 if last else seq):
            return last, Break((last.seq if last else 0) + 1, "missing")
        before = last.hash if last else GENESIS
        if not same or ((last is not None or seq == 1) and link(before, row) != kept):
            return last, Break(seq, "changed", str(fields["subject"]), str(fields["kind"]))
        last = Head(seq, kept)
    return last, None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a name is duplicated, because parsers would use different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is duplicated")
    return found
