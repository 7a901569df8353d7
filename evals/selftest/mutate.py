"""Mutate a reference transcript into transcripts that must not pass.

The operators use only the patterns of the checks, not their code.

`UNIVERSAL` operators apply to every case. A `DIRECTED` operator is for one kind of check and receives the check's spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from evals.selftest.reference_transcript import Row, Script
from evals.selftest.rewrite import closing, edited, failed, inserted, pair_of, put, without
from evals.transcripts.canonical import FORMAT, OURS
from evals.transcripts.seals import FIELD, Chain, Sealer

Mutant = tuple[Script, Chain | None]
UNIVERSAL: Final[dict[str, Callable[[Script], Iterator[Mutant]]]] = {}
_KEY: Final = b"selftest"


def universal(make: Callable[[Script], Iterator[Mutant]]) -> Callable[[Script], Iterator[Mutant]]:
    """Register an operator under its name."""
    UNIVERSAL[make.__name__] = make
    return make


@universal
def empty(script: Script) -> Iterator[Mutant]:
    """Remove all messages and calls."""
    yield Script(({"type": "meta", "format": FORMAT}, script.rows[-1]), script.end), None


@universal
def prose_only(script: Script) -> Iterator[Mutant]:
    """Keep the messages and remove the calls."""
    yield Script(tuple(r for r in script.rows if r["type"] not in ("call", "result")), script.end), None


@universal
def truncated(script: Script) -> Iterator[Mutant]:
    """Truncate the transcript after the last result."""
    yield Script(script.rows[: closing(script)], script.end), None


@universal
def lost_result(script: Script) -> Iterator[Mutant]:
    """Remove the result of each call, one at a time."""
    for id in script.our_ids():  # noqa: A001
        yield Script(tuple(r for r in script.rows if (r["type"], r.get("id")) != ("result", id)), script.end), None


@universal
def other_server(script: Script) -> Iterator[Mutant]:
    """Direct all calls to another server with the same tool names."""
    ids = script.our_ids()
    yield edited(script, ids, "call", lambda r: {**r, "server": "gpuwarden-lookalike"}), None


@universal
def all_failed(script: Script) -> Iterator[Mutant]:
    """Make every call to the server fail, while the messages claim success."""
    yield failed(script, script.our_ids()), None


@universal
def without_ok(script: Script) -> Iterator[Mutant]:
    """Remove the success status from replies."""
    ids = script.our_ids()
    yield edited(script, ids, "result", lambda r: {**r, "ok": None, "result": put(r["result"], ("ok",), ...)}), None


@universal
def same_id(script: Script) -> Iterator[Mutant]:
    """Give two different calls the same id."""
    id = script.our_ids()[0]  # noqa: A001
    yield inserted(script, closing(script), *pair_of(id, {"tool": "list_instances", "args": {"platform": "zz"}})), None


@universal
def result_first(script: Script) -> Iterator[Mutant]:
    """Move a result before its call."""
    id = script.our_ids()[0]  # noqa: A001
    result = next(r for r in script.rows if r["type"] == "result" and r["id"] == id)
    rest = tuple(r for r in script.rows[1:] if r is not result)
    yield Script((script.rows[0], result, *rest), script.end), None


@universal
def forged(script: Script) -> Iterator[Mutant]:
    """Edit each sealed reply, one at a time."""
    whole, chain = sealed(script)
    for id in script.our_ids():  # noqa: A001
        yield edited(whole, [id], "result", lambda r: {**r, "result": {**r["result"], "note": "edited"}}), chain


@universal
def cut_out(script: Script) -> Iterator[Mutant]:
    """Omit each call with a sealed reply, one at a time."""
    whole, chain = sealed(script)
    for id in script.our_ids():  # noqa: A001
        yield without(whole, [id]), chain


@universal
def made_up(script: Script) -> Iterator[Mutant]:
    """Add a call that never reached the server, first without a seal and then with a copied seal."""
    whole, chain = sealed(script)
    fresh = pair_of("made-up", {"tool": "list_instances", "result": {"instances": []}})
    yield inserted(whole, closing(whole), *fresh), chain
    seal = next(r["result"][FIELD] for r in whole.rows if r["type"] == "result" and r["id"] == script.our_ids()[0])
    fresh[1] = {**fresh[1], "result": {**fresh[1]["result"], FIELD: seal}}
    yield inserted(whole, closing(whole), *fresh), chain


def sealed(script: Script) -> tuple[Script, Chain]:
    """Seal the server's replies in the order of the results; return the script and the chain of seals."""
    sealer, calls = Sealer(_KEY), {r["id"]: r for r in script.rows if r["type"] == "call"}

    def seal(row: Row) -> Row:
        call = calls.get(row.get("id", ""))
        if row["type"] != "result" or call is None or call["server"] not in OURS:
            return row
        return {**row, "result": sealer.seal(call["tool"], call["args"], row["result"], call.get("at", 0.0))}

    return Script(tuple(seal(r) for r in script.rows), script.end), Chain(_KEY, sealer.n, sealer.last)


# --------------------------------------------------------------------------------------------------------- limits


def over_limits(script: Script, limits: dict[str, Any]) -> Iterator[tuple[str, Script]]:
    """Yield (limit, script) for each limit. In the script, the end state or the number of calls exceeds this limit."""
    views = script.end["views"]
    lost = {"job": "job-x", "path": "out/only-copy", "needed": True, "alive": False, "copies": []}
    yield "lost", _with(script, "checkpoints", lost)
    yield "bypasses", _with(script, "bypasses", {"tool": "Bash", "text": "curl provider"})
    if views["jobs"]:
        yield "duplicates", _with(script, "jobs", {**views["jobs"][0], "job": "job-again"})
    if limits.get("job_usd") is not None:
        lease = {"lease": "lease-x", "job": None, "state": "stopped", "usd": limits["job_usd"] + 0.01, "idle_usd": 0}
        yield "job_usd", _with(script, "leases", lease)
    rows = [row for n in range(61) for row in pair_of(f"more-{n}", {"tool": "Read", "server": ""})]
    yield "tool_calls", inserted(script, closing(script), *rows)


def _with(script: Script, view: str, row: Row) -> Script:
    views = script.end["views"]
    return Script(script.rows, {**script.end, "views": {**views, view: [*views.get(view, []), row]}})
