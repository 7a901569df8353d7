"""Check conduct: the tools called, their order, and the evidence for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evals.scoring.checks import (
    MAX_WORK,
    PASS,
    Outcome,
    Trial,
    a_call,
    a_number,
    a_pattern,
    calls,
    fail,
    found,
    kind,
    not_exercised,
)
from evals.scoring.matching import Env, match, match_call
from evals.transcripts.canonical import Call


class TooMuch(Exception):
    """Raised when a check would try more candidate assignments than MAX_WORK."""


@kind("calls", {"call": a_call}, {"min": a_number, "max": a_number, "example": a_call, "gate": a_call})
def check_calls(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that at least `min` and at most `max` calls match `call`; by default, only successful calls count.

    If no call is allowed, `example` is a matching call that the self-test inserts. A call that matches `gate` also
    counts, because its reply shows that the gate itself made this check.
    """
    patterns = [spec["call"], *([spec["gate"]] if "gate" in spec else [])]
    fit = {call.seq: call for pattern in patterns for call, _ in found(trial, pattern, trial.env, ok=True)}
    hits = list(fit.values())
    least, most = spec.get("min", 0), spec.get("max")
    if len(hits) < least:
        return fail(f"{len(hits)} calls to {_name(spec['call'])}, at least {least} required")
    if most is not None and len(hits) > most:
        return fail(f"{len(hits)} calls to {_name(spec['call'])}, at most {most} allowed", act=True, seqs=_seqs(hits))
    return PASS


@kind("never", {"call": a_call, "example": a_call}, {"lead": calls})
def check_never(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that no call matches `call`, including failed calls.

    `example` is a matching call that demonstrates the pattern.

    `lead` lists calls that the self-test inserts before the example, so that the example fails only this check.
    """
    hits = [call for call, _ in found(trial, spec["call"], trial.env)]
    if hits:
        first = hits[0]
        deed = f"`{first.command[:120]}`" if first.command else first.tool
        return fail(f"{deed} was called", act=True, seqs=_seqs(hits))
    return PASS


@kind("order", {"steps": calls})
def check_order(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that calls match the `steps` in order, and that each result arrived before the next call."""
    steps, work = spec["steps"], [0]

    def walk(n: int, after: int, env: Env) -> bool:
        if n == len(steps):
            return True
        for call, bound in found(trial, steps[n], env, ok=True):
            _spend(work)
            if call.seq > after and call.done_seq is not None and walk(n + 1, call.done_seq, bound):
                return True
        return False

    try:
        if walk(0, -1, trial.env):
            return PASS
    except TooMuch:
        return fail("too many similar calls to determine their order")
    return fail(f"not in this order: {', '.join(_name(s) for s in steps)}")


def needs(value: Any) -> Iterator[str]:
    """Yield the errors in a list of call patterns, each of which may also have `latest` and `after`."""
    plain = [{k: v for k, v in need.items() if k not in ("latest", "after")} for need in value]
    yield from calls(plain)
    for need in value:
        if "after" in need:
            yield from a_call(need["after"])
        if not isinstance(need.get("latest", False), bool):
            yield "latest must be true or false"


@kind("guard", {"call": a_call, "needs": needs}, {"must": a_pattern, "gate": a_pattern})
def check_guard(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that evidence precedes each call that matches `call`: for each pattern in `needs`, an earlier call with the
    same bindings must match.

    `must` is a pattern for the guarded call's own arguments. A pattern with `latest` accepts only the newest answer to
    the same question; the evidence for a pattern with `after` must be newer than every earlier call that matches
    `after`. No evidence is needed if the guarded call's own result matches `gate`, because that result shows that the
    gate itself made this check.
    """
    guarded = list(found(trial, spec["call"], trial.env))
    if not guarded:
        return not_exercised(f"{_name(spec['call'])} was never called")
    for call, env in guarded:
        if "gate" in spec and match(spec["gate"], call.result, env) is not None:
            continue
        try:
            missing = _unmet(spec, trial, call, env)
        except TooMuch:
            missing = "too many similar calls to find the evidence"
        if missing:
            return fail(f"{call.tool} without {missing}", act=True, seqs=(call.seq,))
    return PASS


def _unmet(spec: dict[str, Any], trial: Trial, call: Call, env: Env) -> str:
    """Describe the evidence that a guarded call lacks; empty if nothing is missing."""
    if "must" in spec:
        bound = match_call({"tool": call.tool, "server": call.server, "args": spec["must"]}, call, env)
        if bound is None:
            return "the required arguments"
        env = bound
    if _all_met(spec["needs"], trial, call, env, [0]):
        return ""
    for n, need in enumerate(spec["needs"], 1):
        if not _all_met(spec["needs"][:n], trial, call, env, [0]):
            return f"an earlier {_name(need)} with the required result"
    return "its evidence"


def _all_met(needs: Sequence[dict[str, Any]], trial: Trial, call: Call, env: Env, work: list[int]) -> bool:
    """Return true if some combination of calls matches all patterns in `needs` with one set of bindings."""
    if not needs:
        return True
    for proof, bound in found(trial, _pattern(needs[0]), env, ok=True):
        _spend(work)
        if _counts(needs[0], trial, proof, call, bound) and _all_met(needs[1:], trial, call, bound, work):
            return True
    return False


def _counts(need: dict[str, Any], trial: Trial, proof: Call, call: Call, env: Env) -> bool:
    """Return true if the evidence precedes the guarded call and is as recent as `latest` and `after` require."""
    if not _before(proof, call):
        return False
    if need.get("latest"):
        # If the same question was answered again before the guarded call and the newer answer is not evidence, the
        # older answer is out of date.
        question = {k: v for k, v in _pattern(need).items() if k not in ("result", "ok")}
        for other, _ in found(trial, question, env):
            later = _before(other, call) and (other.done_seq or 0) > (proof.done_seq or 0)
            if later and match_call(_pattern(need), other, env, ok=True) is None:
                return False
    if "after" in need:
        events = (e for e, _ in found(trial, need["after"], env, ok=True) if e.seq < call.seq)
        return all(e.done_seq is not None and e.done_seq < proof.seq for e in events if e is not proof)
    return True


def _pattern(need: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in need.items() if k not in ("latest", "after")}


def _before(a: Call, b: Call) -> bool:
    return a.done_seq is not None and a.done_seq < b.seq


def _spend(work: list[int]) -> None:
    work[0] += 1
    if work[0] > MAX_WORK:
        raise TooMuch


def _seqs(hits: list[Call]) -> tuple[int, ...]:
    return tuple(call.seq for call in hits)


def _name(pattern: dict[str, Any]) -> str:
    return f"shell /{pattern['shell']}/" if "shell" in pattern else str(pattern["tool"])
