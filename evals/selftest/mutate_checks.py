"""Define operators for each kind of check: each operator breaks exactly the property that the check verifies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from evals.scoring.check_words import mentions
from evals.scoring.checks import Check
from evals.scoring.matching import regex
from evals.selftest.reference_transcript import Row, Script
from evals.selftest.rewrite import (
    closing,
    copies,
    edited,
    failed,
    flipped,
    get,
    hits,
    index,
    inserted,
    leaves,
    moved,
    pair_of,
    put,
    spoilt,
    without,
)

Named = Iterator[tuple[str, Script]]
DIRECTED: Final[dict[str, Callable[[Script, Check], Named]]] = {}


def directed(kind: str) -> Callable[[Callable[[Script, Check], Named]], Callable[[Script, Check], Named]]:
    """Register the operators for one kind of check; they yield (operator, mutant)."""

    def wrap(make: Callable[[Script, Check], Named]) -> Callable[[Script, Check], Named]:
        DIRECTED[kind] = make
        return make

    return wrap


def _contradicted(
    script: Script, ids: list[str], pattern: dict[str, Any], *, part: str, all_vars: bool = True
) -> Named:
    """Change the value at each leaf of the pattern's `result` or `args` in all of these calls, so that it no longer
    matches.
    """
    row_kind = "result" if part == "result" else "call"
    for path, leaf in leaves(pattern.get(part, {})):
        if isinstance(leaf, str) and leaf.startswith("$") and not leaf.startswith("$scenario") and not all_vars:
            continue
        value = get(script.rows[index(script, ids[0], row_kind)][part], path) if ids else None
        for other in spoilt(leaf, value):
            if path != ("ok",):
                yield f"{part} contradicts", _put(script, ids, part, path, other)


def _put(script: Script, ids: list[str], part: str, path: tuple[str | int, ...], value: Any) -> Script:
    """Set another value at a path in the `args` or the `result` of these calls; `...` removes the value."""
    row_kind = "result" if part == "result" else "call"
    return edited(script, ids, row_kind, lambda r: {**r, part: put(r[part], path, value)})


def _shared(spec: dict[str, Any]) -> set[str]:
    """Return the names that occur more than once in a spec and therefore link calls."""
    words = json.dumps(spec).replace('"', " ").split()
    names = {w.strip(",:{}[]") for w in words if w.startswith("$")}
    return {n for n in names if sum(w.strip(",:{}[]") == n for w in words) > 1}


def _retargeted(script: Script, ids: list[str], pattern: dict[str, Any], shared: set[str]) -> Named:
    """Replace every value in the evidence that could identify the guarded call."""
    for part, row_kind in (("args", "call"), ("result", "result")):
        for path, leaf in leaves(pattern.get(part, {})):
            if leaf in shared if isinstance(leaf, str) else False:
                change = lambda r, q=part, p=path: {**r, q: put(r[q], p, f"other-{get(r[q], p)}")}  # noqa: E731
                yield "evidence of another", edited(script, ids, row_kind, change)


@directed("guard")
def break_guard(script: Script, check: Check) -> Named:
    """Break the evidence in several ways: missing, failed, false, about another subject, too late, or out of date."""
    spec, deeds = check.spec, hits(script, check.spec["call"])
    if not deeds:
        return
    if not check.may_skip:
        yield "deed dropped", without(script, deeds)
    for path, _ in leaves(spec.get("must", {})):
        for new in (..., "other"):
            yield "deed without its argument", _put(script, deeds, "args", path, new)
    for need in spec["needs"]:
        yield from _break_need(script, spec, need, deeds)


def _break_need(script: Script, spec: dict[str, Any], need: dict[str, Any], deeds: list[str]) -> Named:
    """Break the evidence for one pattern in a guard's `needs`, in every way that `break_guard` lists."""
    pattern = {k: v for k, v in need.items() if k not in ("latest", "after")}
    proofs = [id for id in hits(script, pattern, ok=True) if id not in deeds]  # noqa: A001
    if not proofs:
        return
    last_call, last_done = index(script, deeds[-1], "call"), index(script, deeds[-1], "result")
    yield "evidence dropped", without(script, proofs)
    yield "evidence failed", failed(script, proofs)
    yield "evidence failed in name", flipped(script, proofs)
    yield from _contradicted(script, proofs, pattern, part="result", all_vars=False)
    yield from _retargeted(script, proofs, pattern, _shared(spec))
    yield "evidence after the deed", moved(script, proofs, last_done)
    yield "evidence arrives too late", moved(script, proofs, last_call, kinds=("result",))
    first = index(script, deeds[0], "call")
    if need.get("latest"):
        for _, worse in _contradicted(script, proofs, pattern, part="result", all_vars=False):
            fresh = copies(worse, proofs[-1], 1)
            yield "evidence out of date", inserted(script, first, *fresh)
        yield "evidence out of date", inserted(script, first, *copies(failed(script, proofs), proofs[-1], 1))
    events = hits(script, need["after"], ok=True) if "after" in need else []
    if events:
        yield "evidence from before", inserted(script, first, *copies(script, events[-1], 1))


@directed("order")
def break_order(script: Script, check: Check) -> Named:
    """Omit a step, make it fail, falsify its result, or move it after the next step."""
    steps = check.spec["steps"]
    for n, step in enumerate(steps):
        ids = hits(script, step, ok=True)
        yield "step dropped", without(script, ids)
        yield "step turned round", flipped(script, ids)
        yield from _contradicted(script, ids, step, part="result", all_vars=False)
        yield from _contradicted(script, ids, step, part="args", all_vars=False)
        yield from _retargeted(script, ids, step, _shared(check.spec))
        later = hits(script, steps[n + 1], ok=True) if n + 1 < len(steps) else []
        if later and not set(ids) & set(later):
            yield "step after the next", moved(script, ids, index(script, later[-1], "result"))
            yield "step arrives too late", moved(script, ids, index(script, later[-1], "call"), kinds=("result",))


@directed("calls")
def break_calls(script: Script, check: Check) -> Named:
    """Make too few or too many matching calls."""
    spec = check.spec
    if "gate" in spec:  # one call with the gate's reply is enough to pass, so every mutant omits such calls
        shown = set(hits(script, spec["gate"])) - set(hits(script, spec["call"]))
        script = without(script, shown)
    ids = hits(script, spec["call"], ok=True)
    if spec.get("min", 0) > 0:
        yield "call dropped", without(script, ids)
        yield "call turned round", flipped(script, ids)
        yield from _contradicted(script, ids, spec["call"], part="result")
        yield from _contradicted(script, ids, spec["call"], part="args")
        if spec["min"] > 1:
            yield "one too few", without(script, ids[:1])
    if "max" in spec and ids:
        rows = copies(script, ids[0], int(spec["max"]))
        yield "one too many", inserted(script, closing(script), *rows)
    elif "example" in spec:
        rows = [row for n in range(int(spec["max"]) + 1) for row in pair_of(f"extra-{n}", spec["example"])]
        yield "one too many", inserted(script, closing(script), *rows)


@directed("never")
def break_never(script: Script, check: Check) -> Named:
    """Insert the call from the case's example, and a failed copy of it if failed calls count too."""
    example = check.spec["example"]
    lead = [row for n, call in enumerate(check.spec.get("lead", [])) for row in pair_of(f"lead-{n}", call)]
    call, result = pair_of("forbidden", example)
    yield "forbidden deed", inserted(script, closing(script), *lead, call, result)
    yield "forbidden call by a subagent", inserted(script, closing(script), *lead, {**call, "agent": "helper"}, result)
    if not {"ok", "result"} & check.spec["call"].keys():
        rows = pair_of("forbidden", {**example, "ok": False})
        yield "forbidden deed tried", inserted(script, closing(script), *rows)


@directed("sum")
def break_sum(script: Script, check: Check) -> Named:
    """Exceed the sum in one call or in several, and omit the number or make it invalid in every way."""
    spec, ids = check.spec, hits(script, check.spec["call"], ok=True)
    part, *rest = spec["field"].split(".")
    kind, path = part, tuple(rest)
    yield "over the sum", _put(script, ids[-1:], kind, path, spec["max"] + 0.01)
    for value in (..., None, str(spec["max"]), True, -1, [spec["max"]]):
        yield "no number", _put(script, ids[-1:], kind, path, value)
    if ids:
        full = _put(script, ids, kind, path, spec["max"])
        yield "over the sum together", inserted(full, closing(full), *copies(full, ids[0], 1))
        yield "call dropped", without(script, ids)


@directed("pace")
def break_pace(script: Script, check: Check) -> Named:
    """Make the calls too quickly, without timestamps, too often in a row, or not at all."""
    spec, ids = check.spec, hits(script, check.spec["call"])
    yield "call dropped", without(script, ids)
    if "min_gap_s" in spec and len(ids) > 1:
        yield "too fast", edited(script, ids, "call", lambda r: {**r, "at": 1.0})
        yield "without a time", edited(script, ids, "call", lambda r: {k: v for k, v in r.items() if k != "at"})
    if "max_in_a_row" in spec and ids:
        pause = pair_of("pause", {"tool": "Read", "server": ""})
        rows = copies(script, ids[-1], int(spec["max_in_a_row"]) + 1)
        yield "too many consecutive calls", inserted(script, index(script, ids[-1], "result") + 1, *pause, *rows)


@directed("state")
def break_state(script: Script, check: Check) -> Named:
    """Replace, remove or multiply the rows of the end state."""
    spec, views = check.spec, script.end["views"]
    rows: list[Row] = views.get(spec["view"], [])
    if spec.get("min", 1):
        yield "rows gone", _viewed(script, spec["view"], [])
    for part in ("is", "where"):
        for path, leaf in leaves(spec.get(part, {})):
            for other in spoilt(leaf, get(rows[0], path) if rows else None):
                if other is not ... and other is not None and isinstance(other, type(get(rows[0], path))):
                    yield f"{part} broken", _viewed(script, spec["view"], [put(r, path, other) for r in rows])
    if "max" in spec:
        again = [{**r, "job": f"more-{n}", "spec": f"more-{n}"} for n, r in enumerate(rows * (1 + int(spec["max"])))]
        yield "too many rows", _viewed(script, spec["view"], [*rows, *again])


def _viewed(script: Script, view: str, rows: list[Row]) -> Script:
    return Script(script.rows, {**script.end, "views": {**script.end["views"], view: rows}})


@directed("schema")
def break_schema(script: Script, _: Check) -> Named:
    """Add an unknown argument, omit an argument, or give it another type or a value that is out of bounds."""
    for id in script.our_ids()[:3]:  # noqa: A001
        args = script.rows[index(script, id, "call")]["args"]
        yield "unknown argument", _args(script, id, {**args, "approved": True})
        for name, value in args.items():
            other = 7 if not isinstance(value, (int, float)) or isinstance(value, bool) else "7"
            yield "argument of another type", _args(script, id, {**args, name: other})
    submits = hits(script, {"tool": "submit_job"})
    for id in submits[:1]:  # noqa: A001
        args = script.rows[index(script, id, "call")]["args"]
        yield "argument with an element of another type", _args(script, id, {**args, "outputs": ["out", 7]})
        yield "argument with a value of another type", _args(script, id, {**args, "env": {"LR": 0.1}})
        yield "argument outside its list", _args(script, id, {**args, "teardown": "now"})

    for id in hits(script, {"tool": "check_job"})[:1]:  # noqa: A001
        args = script.rows[index(script, id, "call")]["args"]
        yield "argument out of bounds", _args(script, id, {**args, "log_bytes": 1_000_000})
        yield "argument too long", _args(script, id, {**args, "job_id": "j" * 65})
        yield "argument left out", _args(script, id, {k: v for k, v in args.items() if k != "job_id"})


def _args(script: Script, id: str, args: Any) -> Script:  # noqa: A002
    return edited(script, [id], "call", lambda r: {**r, "args": args})


@directed("claim")
def break_claim(script: Script, check: Check) -> Named:
    """Make the claim without evidence, with failed or false evidence, or before the evidence."""
    claimed, unless = [], check.spec.get("unless")
    for i, row in enumerate(script.rows):
        if row["type"] == "say" and row["role"] == "assistant":
            sentences = row["text"].replace(". ", ".\n").split("\n")  # split without the scorer's own expression
            hit = [s for s in sentences if regex(check.spec["if"]).search(s)]
            if any(unless is None or not regex(unless).search(s) for s in hit):
                claimed.append(i)
    if not claimed:
        return
    if not check.may_skip:
        quiet = [{**r, "text": "Done."} if i in claimed else r for i, r in enumerate(script.rows)]
        yield "claim dropped", Script(tuple(quiet), script.end)
    for need in check.spec["needs"]:
        ids = hits(script, need, ok=True)
        yield "claim without evidence", without(script, ids)
        yield "claim on failed evidence", failed(script, ids)
        yield "claim on evidence whose status is inverted", flipped(script, ids)
        yield from _contradicted(script, ids, need, part="result")
    says = [script.rows[i] for i in claimed]
    rest = [r for i, r in enumerate(script.rows) if i not in claimed]
    yield "claim before the evidence", Script((*rest[:2], *says, *rest[2:]), script.end)


@directed("covers")
def break_covers(script: Script, check: Check) -> Named:
    """Remove the closing words, move them before the work, and omit each point, one at a time."""
    yield "silent ending", _reworded(script, lambda _: "Done.")
    says = [r for r in script.rows if r["type"] == "say" and r["role"] == "assistant"]
    rest = [r for r in script.rows if r not in says]
    yield "words before the work", Script((*rest[:2], *says, *rest[2:]), script.end)
    for point in check.spec["points"]:
        yield from _unsaid(script, point)


def _unsaid(script: Script, point: dict[str, Any]) -> Named:
    """Omit one point from the closing words, invent its value, or remove the value from the replies."""
    if "any" in point:

        def cut(text: str) -> str:
            for expression in point["any"]:
                while regex(expression).search(text) and regex(expression).sub("", text) != text:
                    text = regex(expression).sub("", text)
            return text

        yield "point left out", _reworded(script, cut)
    elif "value" in point:
        seen = hits(script, point["from"], ok=True)
        yield "value never seen", without(script, seen)
        path = next(p for p, leaf in leaves(point["from"]["result"]) if leaf == point["value"])
        values = [get(script.rows[index(script, i, "result")]["result"], path) for i in seen]

        def made_up(text: str) -> str:
            words = text.split(" ")
            return " ".join("something" if any(mentions(word, v) for v in values) else word for word in words)

        yield "value made up", _reworded(script, made_up)


def _reworded(script: Script, change: Callable[[str], str]) -> Script:
    rows = (
        {**r, "text": change(r["text"]) or "Done."} if r["type"] == "say" and r["role"] == "assistant" else r
        for r in script.rows
    )
    return Script(tuple(rows), script.end)


@directed("trigger")
def break_trigger(script: Script, check: Check) -> Named:
    """Don't load the skill, load another one, or make the load fail; or load a skill that must not be loaded."""
    ids = [r["id"] for r in script.rows if r["type"] == "call" and r["tool"] == "Skill"]
    if check.spec.get("loaded", True):
        yield "skill not loaded", without(script, ids)
        yield "another skill", edited(script, ids, "call", lambda r: {**r, "args": {"skill": "cooking"}})
        yield "skill failed to load", edited(script, ids, "result", lambda r: {**r, "ok": False})
        return
    skill = check.spec["skill"]
    for tool, args in (
        ("Skill", {"skill": f"gpuwarden:{skill}"}),
        ("Read", {"file_path": f"/home/u/.claude/skills/{skill}/SKILL.md"}),
        ("Bash", {"command": f"cat skills/{skill}/SKILL.md"}),
    ):
        yield "skill loaded", inserted(script, 2, *pair_of("skill", {"tool": tool, "server": "", "args": args}))


@directed("budget")
def break_budget(script: Script, check: Check) -> Named:
    """Exceed each bound, and remove the figures from the transcript."""
    end = script.rows[-1]
    for key, most in check.spec.items():
        name = key.removeprefix("max_")
        if name == "calls":
            rows = [r for n in range(int(most)) for r in pair_of(f"more-{n}", {"tool": "Read", "server": ""})]
            yield "over budget", inserted(script, closing(script), *rows)
            continue
        yield "over budget", Script((*script.rows[:-1], {**end, name: most + 1}), script.end)
        bare = {k: v for k, v in end.items() if k != name}
        yield "budget not stated", Script((*script.rows[:-1], bare), script.end)
