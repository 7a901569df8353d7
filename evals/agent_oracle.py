"""Does what the case's witness did, with the values that this trial's replies hold. It must pass every case.

Ids, receipts and prices differ from trial to trial. Where a reply holds another value than the witness's reply at the
same place, the oracle uses the new one from then on, in arguments and in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evals.canonical import Call, Say
from evals.cases import Case
from evals.recorder import Recorder
from evals.witness import witness


def play(case: Case, recorder: Recorder) -> None:
    """Follow the witness."""
    transcript = witness(case).transcript()
    known = dict(_changes(witness(case).end.get("facts", {}), recorder.scene.facts))
    events: list[Call | Say] = [*transcript.calls, *transcript.says]
    for event in sorted(events, key=lambda e: e.seq):
        if isinstance(event, Say):
            if event.role == "assistant":
                recorder.say(_renewed(event.text, known))
        elif event.tool == "Skill":
            recorder.load_skill(str(event.args["skill"]))
        elif event.ours:
            reply = recorder.call(event.tool, _renewed(event.args, known))
            known.update(_changes(event.result, reply))


def _changes(old: Any, new: Any) -> Iterator[tuple[str, str]]:
    """(old text, new text) of the values that differ at the same place."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() & new.keys():
            yield from _changes(old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        for a, b in zip(old, new, strict=False):
            yield from _changes(a, b)
    elif isinstance(old, str) and isinstance(new, str) and old != new and len(old) >= 4:
        if any(c.isdigit() for c in old):  # an id, a digest, a path: no word that may stand for something else
            yield old, new
    elif isinstance(old, int | float) and isinstance(new, int | float) and old != new and len(f"{old:g}") >= 3:
        yield from ((form(old), form(new)) for form in ("{:.2f}".format, "{:g}".format))


def _renewed(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: _renewed(v, known) for k, v in value.items()}
    if isinstance(value, list):
        return [_renewed(v, known) for v in value]
    if isinstance(value, str):
        for old in sorted(known, key=len, reverse=True):
            value = value.replace(old, known[old])
    return value
