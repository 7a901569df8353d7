"""Rewrite a reference transcript in small steps that operators combine. Each function returns a new script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

from evals.scoring.matching import match, match_call
from evals.selftest.reference_transcript import Row, Script

Path = tuple[str | int, ...]
FAILED = {"ok": False, "code": "unreachable", "message": "no answer"}


def hits(script: Script, pattern: dict[str, Any], *, ok: bool | None = None) -> list[str]:
    """Return the ids of the calls that match a pattern."""
    env = script.end_state().facts
    return [c.id for c in script.transcript().calls if match_call(pattern, c, env, ok=ok) is not None]


def without(script: Script, ids: Collection[str]) -> Script:
    """Remove these calls and their results."""
    return Script(tuple(r for r in script.rows if r.get("id") not in ids), script.end)


def edited(script: Script, ids: Collection[str], kind: str, change: Callable[[Row], Row]) -> Script:
    """Apply `change` to the call or result rows with these ids."""
    rows = (change(copy.deepcopy(r)) if r["type"] == kind and r["id"] in ids else r for r in script.rows)
    return Script(tuple(rows), script.end)


def failed(script: Script, ids: Collection[str]) -> Script:
    """Make these calls fail."""
    return edited(script, ids, "result", lambda r: {**r, "ok": False, "result": FAILED})


def flipped(script: Script, ids: Collection[str]) -> Script:
    """Invert the status of these calls, without other changes to their results."""

    def flip(row: Row) -> Row:
        ok = not row["ok"]
        result = {**row["result"], "ok": ok} if isinstance(row["result"], dict) else row["result"]
        return {**row, "ok": ok, "result": result}

    return edited(script, ids, "result", flip)


def index(script: Script, id: str, kind: str) -> int:  # noqa: A002
    """Return the index of the call or result row with an id."""
    return next(i for i, r in enumerate(script.rows) if r["type"] == kind and r["id"] == id)


def moved(script: Script, ids: Collection[str], at: int, *, kinds: Collection[str] = ("call", "result")) -> Script:
    """Move these rows after row `at`."""
    chosen = [i for i, r in enumerate(script.rows) if r.get("id") in ids and r["type"] in kinds]
    block = [script.rows[i] for i in chosen]
    head = [r for i, r in enumerate(script.rows) if i <= at and i not in chosen]
    tail = [r for i, r in enumerate(script.rows) if i > at and i not in chosen]
    return Script((*head, *block, *tail), script.end)


def inserted(script: Script, at: int, *rows: Row) -> Script:
    """Insert rows before row `at`."""
    return Script((*script.rows[:at], *rows, *script.rows[at:]), script.end)


def copies(script: Script, id: str, count: int, *, gap: float = 3600.0) -> list[Row]:  # noqa: A002
    """Return copies of a call and its result, `gap` seconds apart."""
    call, result = script.rows[index(script, id, "call")], script.rows[index(script, id, "result")]
    rows: list[Row] = []
    for n in range(1, count + 1):
        at = {"at": call["at"] + n * gap} if "at" in call else {}
        rows += [{**call, **at, "id": f"{id}-{n}"}, {**result, "id": f"{id}-{n}"}]
    return rows


def pair_of(id: str, example: dict[str, Any]) -> list[Row]:  # noqa: A002
    """Return the call and result rows for an example in a case."""
    ok = example.get("ok", True)
    call = {"type": "call", "id": id, "server": example.get("server", "gpuwarden"), "tool": example["tool"]}
    result = {"ok": ok, **example.get("result", {})} if call["server"] else example.get("result", "")
    return [{**call, "args": example.get("args", {})}, {"type": "result", "id": id, "ok": ok, "result": result}]


def closing(script: Script) -> int:
    """Return the index of the first row of the closing words, which follow the last result."""
    return 1 + max((i for i, r in enumerate(script.rows) if r["type"] in ("call", "result")), default=0)


def leaves(pattern: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, sub-pattern) for every leaf of an object pattern."""
    if isinstance(pattern, dict) and pattern and not any(k.startswith("@") for k in pattern):
        for key, part in pattern.items():
            yield from leaves(part, (*path, key))
    elif path:
        yield path, pattern


def get(value: Any, path: Path) -> Any:
    """Return the value at a path, or None if the path does not exist."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """Return a copy with another value at a path; the value `...` removes the path."""
    key, rest = path[0], path[1:]
    base = dict(value) if isinstance(value, dict) else {}
    if rest:
        return {**base, key: put(base.get(key), rest, new)}
    if new is ...:
        return {k: v for k, v in base.items() if k != key}
    return {**base, key: new}


def spoilt(pattern: Any, value: Any) -> Iterator[Any]:
    """Yield values that don't match the pattern: one of another type, one with different content, and `...` for a
    missing value.
    """
    others: list[Any] = [not value] if isinstance(value, bool) else []
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        others += [str(value), value + 1_000_000, -value - 1_000_000]
    others += [f"other-{value}" if isinstance(value, str) else "other", [], None, ...]
    for other in others:
        gone = other is ...
        fits = match({"x": pattern}, {} if gone else {"x": other}, {"$never": 0})
        if fits is None:
            yield other
