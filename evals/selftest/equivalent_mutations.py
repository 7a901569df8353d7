"""Change a reference transcript in ways that do not affect its verdict. It must still pass after each operator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from evals.selftest.reference_transcript import Row, Script
from evals.selftest.rewrite import FAILED, closing, index, inserted, pair_of

BENIGN: Final[dict[str, Callable[[Script], Iterator[Script]]]] = {}
_READS: Final = frozenset({"hub_repo_details", "list_instances", "check_job", "search_references"})


def benign(make: Callable[[Script], Iterator[Script]]) -> Callable[[Script], Iterator[Script]]:
    """Register an operator under its name."""
    BENIGN[make.__name__] = make
    return make


@benign
def unrelated_calls(script: Script) -> Iterator[Script]:
    """Add calls that read a file, search the references, and call another server's failing tool with the same name."""
    read = pair_of("noise-1", {"tool": "Read", "server": "", "args": {"file_path": "train.py"}})
    refs = pair_of("noise-2", {"tool": "search_references", "args": {"query": "spot"}, "result": {"hits": []}})
    other = pair_of("noise-3", {"tool": "submit_job", "server": "elsewhere", "ok": False, "result": FAILED})
    for at in (2, closing(script)):
        yield inserted(script, at, *read, *refs, *other)


@benign
def chatter(script: Script) -> Iterator[Script]:
    """Add words between the calls."""
    yield inserted(script, 2, {"type": "say", "role": "assistant", "text": "Let me look at this."})


@benign
def other_ids(script: Script) -> Iterator[Script]:
    """Replace the ids with ids in another harness's format."""
    yield _mapped(script, lambda r: {**r, "id": f"toolu_{r['id']}x"} if "id" in r else r)


@benign
def other_times(script: Script) -> Iterator[Script]:
    """Shift the timestamps of the session to another day."""
    yield _mapped(script, lambda r: {**r, "at": r["at"] + 864_000.0} if "at" in r else r)


@benign
def other_numbers(script: Script) -> Iterator[Script]:
    """Write integers as floats (20.0), as some harnesses do, and keys in another order."""
    yield _mapped(script, lambda r: {**r, "result": _floats(r["result"])} if r["type"] == "result" else r)
    yield Script(tuple(json.loads(json.dumps(r, sort_keys=True)) for r in script.rows), script.end)


@benign
def subagent_reads(script: Script) -> Iterator[Script]:
    """Insert a lookup by a subagent."""
    rows = pair_of("aside", {"tool": "search_references", "args": {"query": "x"}, "result": {"hits": []}})
    words: Row = {"type": "say", "role": "assistant", "text": "Found nothing.", "agent": "helper"}
    yield inserted(script, 2, {**rows[0], "agent": "helper"}, rows[1], words)


@benign
def retried_read(script: Script) -> Iterator[Script]:
    """Insert a failed attempt at the first call, if that call is read-only."""
    ids = script.our_ids()
    call = script.rows[index(script, ids[0], "call")]
    if call["tool"] in _READS:
        first = {**call, "id": "first-try"} | ({"at": call["at"] - 600} if "at" in call else {})
        yield inserted(script, 2, first, {"type": "result", "id": "first-try", "ok": False, "result": FAILED})


def _mapped(script: Script, change: Callable[[Row], Row]) -> Script:
    return Script(tuple(change(r) for r in script.rows), script.end)


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_floats(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
