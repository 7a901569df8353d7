"""Check the scenario's end state and the validity of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evals.scoring.checks import (
    PASS,
    Outcome,
    Trial,
    a_call,
    a_number,
    a_pattern,
    a_text,
    fail,
    found,
    kind,
    not_exercised,
)
from evals.scoring.endstate import VIEWS
from evals.scoring.matching import match
from evals.scoring.surface import faults


def a_view(value: Any) -> Iterator[str]:
    """Yield an error unless the value is the name of a view of the end state."""
    yield from a_text(value)
    if value not in VIEWS:
        yield f"unknown view {value!r}; available views: {', '.join(VIEWS)}"


@kind("state", {"view": a_view}, {"where": a_pattern, "is": a_pattern, "min": a_number, "max": a_number})
def check_state(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that between `min` (default 1) and `max` rows of `view` match `where`, and that all of them also match
    `is`.
    """
    rows = [
        (row, env)
        for row in trial.end.views.get(spec["view"], [])
        if (env := match(spec.get("where", {}), row, trial.env)) is not None
    ]
    least, most = spec.get("min", 1), spec.get("max")
    if len(rows) < least:
        return fail(f"{len(rows)} rows of {spec['view']} match; at least {least:g} required")
    if most is not None and len(rows) > most:
        return fail(f"{len(rows)} rows of {spec['view']} match; at most {most:g} allowed", act=True)
    for row, env in rows:
        if match(spec.get("is", {}), row, env) is None:
            return fail(f"{spec['view']}: {str(row)[:160]} does not match {spec['is']}")
    return PASS


@kind("schema", {}, {"call": a_call})
def check_schema(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check the arguments of calls to the server under test against its schemas. With `call`, check only matching
    calls.
    """
    pattern = spec.get("call", {"tool": {"@exists": True}})
    hits = [call for call, _ in found(trial, pattern, trial.env)]
    if not hits:
        return not_exercised("no call to validate")
    for call in hits:
        for fault in faults(call.tool, call.args):
            return fail(fault, act=True, seqs=(call.seq,))
    return PASS
