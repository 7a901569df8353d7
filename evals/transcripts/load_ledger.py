"""Load an export of gpuwarden's own ledger: one event per line, `{seq, at, subject, kind, state, body}`.

A ledger is the server's record, not the agent's. Each event becomes a call to a server named `ledger`, so that checks
can refer to it. Such a call is never counted as one of the agent's calls.
"""

from __future__ import annotations

from evals.transcripts.canonical import Transcript
from evals.transcripts.fields import seconds
from evals.transcripts.source import Source
from evals.transcripts.transcript_builder import TranscriptBuilder

SERVER = "ledger"
_KEYS = frozenset({"seq", "at", "subject", "kind", "state", "body"})


def claims(source: Source) -> bool:
    """Return whether the first line has the fields of a ledger event."""
    return source.head.keys() >= _KEYS


def load(source: Source) -> list[Transcript]:
    """Load one transcript of events; a gap or a decrease in `seq` is recorded as a problem."""
    builder = TranscriptBuilder("ledger")
    last: int | None = None
    for line, row in source.rows:
        missing, seq = _KEYS - row.keys(), row.get("seq")
        if missing or not isinstance(seq, int):
            builder.problem("unreadable", f"not a ledger event: it lacks {sorted(missing) or 'an integer seq'}", line)
            continue
        if last is not None and seq != last + 1:
            builder.problem("unmatched", f"event {seq} follows event {last}: events are missing or out of order", line)
        name, args = f"e{seq}", {"subject": row["subject"], "body": row["body"]}
        builder.call(name, str(row["kind"]), args, server=SERVER, at=seconds(row["at"]), line=line)
        builder.result(name, {"state": row["state"]}, error=False, literal=True, line=line)
        last = seq
    builder.end("completed")
    return [builder.finish()]
