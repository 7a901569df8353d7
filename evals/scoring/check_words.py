"""Check what the agent wrote and read: claims that need evidence, points that an answer must cover, and skills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from evals.scoring.checks import (
    PASS,
    Outcome,
    Trial,
    a_call,
    a_flag,
    a_regex,
    a_text,
    calls,
    fail,
    found,
    kind,
    not_exercised,
)
from evals.scoring.matching import call_faults, regex, regex_faults
from evals.transcripts.canonical import Call, Say

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")


@kind("claim", {"if": a_regex, "needs": calls}, {"unless": a_regex, "gate": a_call})
def check_claim(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that calls that match `needs` precede every sentence that matches `if` but not `unless`.

    One earlier call that matches `gate` is enough, because its reply shows that the gate itself made this check.
    """
    claims = []
    for say in trial.transcript.says:
        sentences = (s for s in _SENTENCE.split(say.text) if regex(spec["if"]).search(s))
        claimed = (s for s in sentences if "unless" not in spec or not regex(spec["unless"]).search(s))
        if say.role == "assistant" and any(claimed):
            claims.append(say)
    if not claims:
        return not_exercised("no such claim was made")
    for say in claims:
        if "gate" in spec and _shown(spec["gate"], trial, say):
            continue
        for need in spec["needs"]:
            if not _shown(need, trial, say):
                return fail(f"claimed without {need.get('tool', 'a command')}", act=True, seqs=(say.seq,))
    return PASS


def _shown(pattern: dict[str, Any], trial: Trial, say: Say) -> bool:
    """Return true if a call that matches a pattern was answered before a message."""
    return any(c.done_seq and c.done_seq < say.seq for c, _ in found(trial, pattern, trial.env, ok=True))


def points(value: Any) -> Iterator[str]:
    """Yield the errors in the list of points that an answer must cover."""
    for point in value if isinstance(value, list) and value else [None]:
        forms = {"any", "value"} & point.keys() if isinstance(point, dict) else set()
        if not isinstance(point, dict) or not isinstance(point.get("point"), str) or len(forms) != 1:
            yield "a point needs `point` and either `any` (expressions) or `value` (a `$name`)"
            continue
        for text in point.get("any", []):
            yield from regex_faults(text)
        yield from call_faults(point.get("from")) if "value" in point else ()
        if point.keys() - {"point", "any", "value", "from"}:
            yield f"a point can't have the keys {sorted(point.keys() - {'point', 'any', 'value', 'from'})}"


@kind("covers", {"points": points})
def check_covers(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that the closing words (the messages after the last call) contain every point.

    A point is found by an expression or by a value from a reply.
    """
    words = trial.transcript.final_words()
    for point in spec["points"]:
        if "any" in point:
            made = any(regex(text).search(words) for text in point["any"])
        else:
            seen = [env[point["value"]] for _, env in found(trial, point["from"], trial.env, ok=True)]
            made = bool(seen) and mentions(words, seen[-1])
        if not made:
            return fail(f"the closing words do not mention: {point['point']}")
    return PASS


def mentions(words: str, value: Any) -> bool:
    """Return true if a text contains a value: the same string, or a number that is equal after both are rounded to
    three significant digits.
    """
    if isinstance(value, str):
        return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", words) is not None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    numbers = (float(text.replace(",", "")) for text in _NUMBER.findall(words))
    return any(f"{n:.3g}" == f"{value:.3g}" for n in numbers)


@kind("trigger", {"skill": a_text}, {"loaded": a_flag})
def check_trigger(spec: dict[str, Any], trial: Trial) -> Outcome:
    """Check that the skill was loaded with the Skill tool or by reading its file, or was not loaded if `loaded` is
    false.
    """
    hits = [call for call in trial.transcript.calls if _loads(call, spec["skill"])]
    if spec.get("loaded", True):
        return PASS if hits else fail(f"the skill {spec['skill']} was never loaded")
    return fail(f"the skill {spec['skill']} was loaded", act=True, seqs=(hits[0].seq,)) if hits else PASS


def _loads(call: Call, skill: str) -> bool:
    """Return true if a call loaded a skill: with the Skill tool, or by naming its file."""
    if call.server and not (call.ours and call.tool == "read_resource"):
        return False
    args = call.args if isinstance(call.args, dict) else {}
    if call.tool == "Skill":
        named = (args.get(key) for key in ("skill", "command", "name"))
        return call.ok is not False and any(isinstance(n, str) and n.rpartition(":")[2] == skill for n in named)
    texts = [v for v in args.values() if isinstance(v, str)] + ([call.command] if call.command else [])
    return call.ok is not False and any(f"{skill}/SKILL.md" in text for text in texts)
