"""Check costs and call frequency: sums, intervals between calls, and budgets."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from evals.scoring.checks import (
    PASS,
    Outcome,
    Trial,
    a_call,
    a_number,
    a_text,
    fail,
    found,
    kind,
    not_exercised,
)


@kind("sum", {"call": a_call, "field": a_text, "max": a_number})
def check_sum(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that the values of `field` (such as `args.max_cost_usd`) in all matching calls add up to at most `max`.

    The check fails for a missing, negative or non-numeric value, because a call without a valid cap is not capped.
    """
    hits = [call for call, _ in found(trial, spec["call"], trial.env, ok=True)]
    if not hits:
        return not_exercised("no call to add up")
    sum_ = 0.0
    for call in hits:
        value: Any = {"args": call.args, "result": call.result}
        for key in spec["field"].split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            return fail(f"{call.tool} has no valid {spec['field']}: {value!r}", act=True, seqs=(call.seq,))
        sum_ += value
    if sum_ > spec["max"]:
        seqs = tuple(call.seq for call in hits)
        return fail(f"{spec['field']} adds up to {sum_:g}, above {spec['max']:g}", act=True, seqs=seqs)
    return PASS


@kind("pace", {"call": a_call}, {"min_gap_s": a_number, "max_in_a_row": a_number})
def check_pace(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that matching calls are at least `min_gap_s` seconds apart, and that at most `max_in_a_row` of them are
    consecutive.

    With `min_gap_s`, calls without a time fail, because the interval between them is unknown.
    """
    hits = [call for call, _ in found(trial, spec["call"], trial.env)]
    if not hits:
        return not_exercised("no call to pace")
    if "min_gap_s" in spec:
        least = spec["min_gap_s"]
        for a, b in pairwise(hits):
            if a.at is None or b.at is None:
                return fail("the interval between calls without a time is unknown")
            gap = b.at - a.at
            if gap < least:
                return fail(f"{b.tool} repeated after {gap:g} s; minimum: {least:g} s", act=True, seqs=(b.seq,))
    if "max_in_a_row" in spec:
        marked, row, most = {call.seq for call in hits}, 0, spec["max_in_a_row"]
        for call in trial.transcript.calls:
            row = row + 1 if call.seq in marked else 0
            if row > most:
                return fail(f"{row} consecutive calls of {call.tool}; maximum: {most:g}", act=True, seqs=(call.seq,))
    return PASS


@kind("budget", {}, {"max_tokens": a_number, "max_turns": a_number, "max_usd": a_number, "max_calls": a_number})
def check_budget(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that the agent's own usage stays within bounds. The check fails if a value with a limit is missing from the
    transcript.
    """
    meta = trial.transcript.meta
    used = {"tokens": meta.tokens, "turns": meta.turns, "usd": meta.usd, "calls": len(trial.transcript.calls)}
    for key, most in spec.items():
        value = used[key.removeprefix("max_")]
        if value is None:
            return fail(f"the transcript does not record how many {key.removeprefix('max_')} were used")
        if value > most:
            return fail(f"{value:g} {key.removeprefix('max_')}, at most {most:g}", act=True)
    return PASS
