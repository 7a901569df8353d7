"""Insert or remove an entry in a JSON file with comments and trailing commas, without changing anything else.

The text is parsed only to find the positions of its objects, so its comments, order and spacing are kept. All functions
raise ValueError if the text is invalid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_TOKEN: Final = re.compile(r'\s+|//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"/]+', re.DOTALL)
_REST_OF_LINE: Final = re.compile(r"[ \t]*(?://[^\n]*)?\r?\n")
MOST: Final = 20_000_000
DEEP: Final = 200


@dataclass
class Table:
    """The position of an object: `start` is after its opening brace, `end` is at its closing brace."""

    start: int
    end: int
    members: dict[str, Member] = field(default_factory=dict)


@dataclass
class Member:
    """The position of one key with its value. `table` is None if the value is not an object."""

    start: int
    end: int
    table: Table | None


def loads(text: str) -> Any:
    """Parse JSON with comments and trailing commas. Text without a value is parsed as an empty object."""
    words = [word for word, _ in _tokens(text)]
    kept = [w for w, following in zip(words, [*words[1:], ""], strict=False) if w != "," or following not in {"}", "]"}]
    return json.loads(" ".join(kept)) if kept else {}


def inserted(text: str, path: Sequence[str], value: Any) -> tuple[int, str]:
    """Return the offset and the text of the insertion that adds `value` at `path`. Missing objects are created."""
    if not _tokens(text):
        return len(text), json.dumps(_nested(path, value), indent=2, ensure_ascii=False) + "\n"
    table, depth = _table(text), 0
    while path[depth] in table.members:
        child = table.members[path[depth]].table
        if child is None or depth + 1 == len(path):
            raise ValueError(f"{'.'.join(path[: depth + 1])} already exists")
        table, depth = child, depth + 1
    return _new_member(text, table, path[depth], _nested(path[depth + 1 :], value))


def removed(text: str, path: Sequence[str]) -> str:
    """Remove the entry at `path` with its line and its comma, and return the remaining text."""
    table = _table(text)
    for key in path[:-1]:
        child = table.members[key].table if key in table.members else None
        if child is None:
            raise ValueError(f"{key} is not an object")
        table = child
    if path[-1] not in table.members:
        raise ValueError(f"{'.'.join(path)} does not exist")
    member = table.members[path[-1]]
    start, end = member.start, member.end
    follows = re.match(r"\s*,", text[end:])
    if follows:
        end += follows.end()
    elif before := re.search(r",\s*\Z", text[:start]):
        start = before.start()
    if (line := re.search(r"\n[ \t]*\Z", text[:start])) and (rest := re.match(r"[ \t]*(?=\r?\n)", text[end:])):
        start, end = line.start(), end + rest.end()
    return text[:start] + text[end:]


def _nested(path: Sequence[str], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _new_member(text: str, table: Table, key: str, value: Any) -> tuple[int, str]:
    """Return the offset and the text for a new first member in an object, formatted like the existing members."""
    name = json.dumps(key, ensure_ascii=False)
    first = min((m.start for m in table.members.values()), default=None)
    outer = re.search(r"[ \t]*\Z", text[: table.end]) if first is None else None
    line = re.search(r"\n([ \t]*)[^\n]*\Z", text[table.start : first]) if first is not None else None
    if first is not None and line is None:  # `{"a": 1}` on one line
        return table.start, f"{name}: {json.dumps(value, ensure_ascii=False)}, "
    brace = re.search(r"\n([ \t]*)[^\n]*\Z", text[: table.start])
    base = brace[1] if brace else re.match(r"[ \t]*", text)[0]  # type: ignore[index]  # the pattern always matches
    indent = line[1] if line else base + "  "
    unit = indent.removeprefix(base) or "  "
    body = json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", f"\n{indent}")
    rest = _REST_OF_LINE.match(text, table.start)
    at = rest.end() if rest and rest.end() <= table.end else table.start
    head, tail = ("", "\n") if at > table.start else ("\n", "")
    if first is None:
        closed = at > table.start or "\n" in text[table.start : table.end]
        tail = tail if closed or outer is None else f"\n{base}"
        member = f"{head}{indent}{name}: {body}{tail}"
    else:
        member = f"{head}{indent}{name}: {body},{tail}"
    return at, member.replace("\n", "\r\n") if "\r\n" in text else member


def _tokens(text: str) -> list[tuple[str, int]]:
    """Return the tokens of a JSON text with their offsets, without white space and comments."""
    if len(text) > MOST:
        raise ValueError("the file is too large")
    found, at = [], 1 if text.startswith("\ufeff") else 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"invalid JSON at character {at}")
        if not match[0].isspace() and not match[0].startswith(("//", "/*")):
            found.append((match[0], at))
        at = match.end()
    return found


def _table(text: str) -> Table:
    """Return the position of the file's top-level object. Raises ValueError if the file is not one object."""
    loads(text)
    words = _tokens(text)
    table, after = _value(words, 0, 0)
    if table is None or after != len(words):
        raise ValueError("the file does not contain a JSON object")
    return table


def _value(words: list[tuple[str, int]], at: int, depth: int) -> tuple[Table | None, int]:
    """Parse the value at token `at`. Return its position (None if it is not an object), and the next token's index."""
    word, start = words[at]
    if depth > DEEP:
        raise ValueError("the file is nested too deeply")
    if word not in {"{", "["}:
        return None, at + 1
    table, at = Table(start + 1, 0), at + 1
    while words[at][0] not in {"}", "]"}:
        if words[at][0] == ",":
            at += 1
        elif word == "[":
            _, at = _value(words, at, depth + 1)
        else:
            key, where = words[at]
            child, at = _value(words, at + 2, depth + 1)
            last, place = words[at - 1]
            table.members[json.loads(key)] = Member(where, place + len(last), child)
    table.end = words[at][1]
    return (table if word == "{" else None), at + 1
