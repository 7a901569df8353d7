"""A scripted agent that repeats the calls of the case's reference transcript with the values from this trial's replies.

It must pass every case.

Ids, receipts and prices differ from trial to trial. If a value in a reply differs from the value under the same key in
the reference's reply, the oracle replaces the old value with the new one in all later arguments and messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case
from evals.selftest.reference_transcript import reference
from evals.transcripts.canonical import Call, Say


def play(case: Case, recorder: Recorder) -> None:
    """Follow the reference transcript."""
    transcript = reference(case).transcript()
    known = dict(_changes(reference(case).end.get("facts", {}), recorder.scene.facts))
    figures: dict[str, str] = {}  # only for messages, because no argument contains a number from a reply
    events: list[Call | Say] = [*transcript.calls, *transcript.says]
    for event in sorted(events, key=lambda e: e.seq):
        if isinstance(event, Say):
            if event.role == "assistant":
                recorder.say(_renewed(event.text, known | figures))
        elif event.tool == "Skill":
            recorder.load_skill(str(event.args["skill"]))
        elif event.ours:
            reply = recorder.call(event.tool, _renewed(event.args, known))
            known.update(_changes(event.result, reply))
            for a, b in _pairs(event.result, reply):
                if type(a) in (int, float) and type(b) in (int, float) and (isinstance(a, float) or a >= 100):
                    figures |= {form(a): form(b) for form in ("{:.2f}".format, "{:g}".format)}


def _changes(old: Any, new: Any) -> Iterator[tuple[str, str]]:
    """Yield (old, new) for each id, digest or path that differs under the same key."""
    for a, b in _pairs(old, new):
        # A string without a digit may be an ordinary word, which must not be replaced elsewhere.
        if isinstance(a, str) and isinstance(b, str) and len(a) >= 4 and any(c.isdigit() for c in a):
            yield a, b


def _pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (old, new) for each nested value that differs under the same key."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() & new.keys():
            yield from _pairs(old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        for a, b in zip(old, new, strict=False):
            yield from _pairs(a, b)
    elif old != new:
        yield old, new


def _renewed(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: _renewed(v, known) for k, v in value.items()}
    if isinstance(value, list):
        return [_renewed(v, known) for v in value]
    if isinstance(value, str):
        for old in sorted(known, key=len, reverse=True):
            whole_word = rf"(?<![\w.]){re.escape(old)}(?!\w)"
            value = re.sub(whole_word, known[old].replace("\\", r"\\"), value)
    return value
