"""Compare a transcript with the server's own ledger: each must contain the records of the other.

Seals prove that no reply was edited or removed by anyone without the key. The ledger is a second source, written by the
server instead of the recorder, so it also reveals changes in a transcript that was sealed again with the key.

    RUN/<case>/<n>/ledger.jsonl   every event, as `gpuwarden history --json` prints it
    trial.json                    "ledger": {"from": last event before the agent's start}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evals.transcripts.canonical import Call, Problem

Event = dict[str, Any]
FILE = "ledger.jsonl"
_NAMED = (
    ("submit_job", "job_id", "job"),
    ("submit_job", "receipt", "receipt"),
    ("teardown_request", "ticket", "teardown"),
)
"""For each tool, the reply field that contains an id, and the prefix of this id in the ledger's subjects."""


def write(folder: Path, events: Iterable[Event], since: int) -> dict[str, Any]:
    """Write the ledger next to a trial's other files; return the entry for `trial.json`."""
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / FILE).write_text(text, "utf-8")
    return {"from": since}


def problems(folder: Path, head: dict[str, Any], calls: list[Call]) -> list[Problem]:
    """List the differences between a transcript and its ledger; empty if they agree."""
    try:
        events = [json.loads(line) for line in (folder / FILE).read_bytes().splitlines()]
        since = int(head["from"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Problem("seal", f"the trial's ledger can't be read: {error!r}")]
    found = []
    subjects = {e["subject"] for e in events}
    for call in (c for c in calls if c.ours):
        result = call.result if isinstance(call.result, dict) else {}
        for tool, field, prefix in _NAMED:
            value = result.get(field)
            if call.tool == tool and isinstance(value, str) and f"{prefix}/{value}" not in subjects:
                unknown = f"{tool} ({call.id!r}) names the {field} {value!r}, which is not in the ledger"
                found.append(Problem("seal", unknown))
    # Every job accepted and teardown requested since the agent's start must be in the transcript.
    arguments = [json.dumps(c.args) for c in calls if isinstance(c.args, dict)]
    for event in events:
        if event["seq"] <= since:
            continue
        body, subject = event["body"], event["subject"]
        if event["kind"] == "job.accepted" and not any(str(body.get("receipt")) in text for text in arguments):
            found.append(Problem("seal", f"{subject} was accepted, but no call in the transcript launched it"))
        if event["kind"] == "teardown.requested" and not any(str(body.get("job")) in text for text in arguments):
            found.append(Problem("seal", f"{subject} was requested, but no call in the transcript requested it"))
    return found
