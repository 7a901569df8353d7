"""A transcript held against the server's own ledger: what it claims must be there, what is there must be in it.

Seals prove that replies were not edited or cut out by anybody without the key. The ledger is a second witness, kept by
the server and not by whoever recorded: a transcript sealed again by somebody with the key still has to fit it.

    RUN/<case>/<n>/ledger.jsonl   every event, as `gpuwarden history --json` prints it
    trial.json                    "ledger": {"from": last event of the past}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evals.transcripts.canonical import Call, Problem

Event = dict[str, Any]
FILE = "ledger.jsonl"


def write(folder: Path, events: Iterable[Event], since: int) -> dict[str, Any]:
    """Write the ledger beside a trial; what `trial.json` says of it."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / FILE).write_text(text, "utf-8")
    return {"from": since}


def problems(folder: Path, head: dict[str, Any], calls: list[Call]) -> list[Problem]:
    """List the differences between a transcript and the ledger beside it; empty when they agree."""
    try:
        events = [json.loads(line) for line in (folder / FILE).read_bytes().splitlines()]
        since = int(head["from"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Problem("seal", f"the ledger of the trial can't be read: {error!r}")]
    found = list(_claimed([c for c in calls if c.ours], events))
    # Jobs that were accepted and teardowns that were asked for since the agent entered are in the transcript.
    said = [json.dumps(c.args) for c in calls if isinstance(c.args, dict)]
    for event in events:
        if event["seq"] <= since:
            continue
        body, subject = event["body"], event["subject"]
        if event["kind"] == "job.accepted" and not any(str(body.get("receipt")) in text for text in said):
            found.append(Problem("seal", f"{subject} was accepted, and no call of the transcript launched it"))
        if event["kind"] == "teardown.requested" and not any(str(body.get("job")) in text for text in said):
            found.append(Problem("seal", f"{subject} was asked for, and no call of the transcript did"))
    return found


def _claimed(calls: list[Call], events: list[Event]) -> Iterator[Problem]:
    """Jobs, receipts and tickets that a reply names are in the ledger."""
    subjects = {e["subject"] for e in events}
    for call in calls:
        result = call.result if isinstance(call.result, dict) else {}
        for tool, field, room in _NAMED:
            value = result.get(field)
            if call.tool == tool and isinstance(value, str) and f"{room}/{value}" not in subjects:
                yield Problem(
                    "seal", f"{tool} ({call.id!r}) names the {field} {value!r}, which the ledger does not know"
                )


_NAMED = (
    ("submit_job", "job_id", "job"),
    ("submit_job", "receipt", "receipt"),
    ("teardown_request", "ticket", "teardown"),
)
