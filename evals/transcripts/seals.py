"""Seal replies, to prove that a transcript contains all of the server's replies, unchanged and in order.

In a trial, the recording proxy or the server itself adds to each reply:

    "seal": {"n": 1, "at": 1780000060.0, "mac": HMAC-SHA256(key, before | n | at | tool | sha(args) | sha(reply))}

`before` is the MAC of the previous reply. The sealing program keeps the number of replies and the last MAC, and the
agent never has the key. An edited reply, an invented call or a missing call breaks the chain and makes the trial
invalid. `at` is the time of the call, so that the pace of calls can be checked in formats without times.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from evals.transcripts.canonical import Call, Problem

FIELD: Final = "seal"


def _sha(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def without_seal(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply without its seal."""
    return {k: v for k, v in reply.items() if k != FIELD}


def mac(key: bytes, before: str, n: int, at: float, tool: str, args: Any, reply: Any) -> str:
    """Return the MAC of the `n`-th reply of a trial; `before` is the previous MAC, "" for the first reply."""
    message = "|".join((before, str(n), repr(float(at)), tool, _sha(args), _sha(reply)))
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


@dataclass
class Sealer:
    """Seals the replies of one trial in the order in which they are sent."""

    key: bytes
    n: int = 0
    last: str = ""

    def seal(self, tool: str, args: Any, reply: dict[str, Any], at: float) -> dict[str, Any]:
        """Return the reply with its seal; `at` is the time of the call in seconds since the epoch."""
        plain = without_seal(reply)
        self.n += 1
        self.last = mac(self.key, self.last, self.n, at, tool, args, plain)
        return {**plain, FIELD: {"n": self.n, "at": float(at), "mac": self.last}}


@dataclass(frozen=True)
class Chain:
    """The data that is needed to check a trial's seals: the key, the number of replies and the last MAC."""

    key: bytes
    count: int
    last: str


def check(calls: Iterable[Call], chain: Chain, *, cut: bool = False) -> list[Problem]:
    """List the errors in the seals of the calls to the server under test; empty if all are valid.

    `cut`: the session died, so the last replies may not have arrived.
    """
    sealed, problems = _numbered(calls)
    before = ""
    for n in range(1, chain.count + 1):
        call = sealed.pop(n, None)
        if call is None and cut and not sealed:
            return [*problems, Problem("unfinished", f"the session died before reply {n} of {chain.count} arrived")]
        if call is None:
            return [*problems, Problem("seal", f"reply {n} of {chain.count} is missing: it was removed")]
        found, at = call.result[FIELD].get("mac"), call.result[FIELD].get("at")
        if isinstance(at, bool) or not isinstance(at, (int, float)):
            at = 0.0
        reply = without_seal(call.result)
        before = mac(chain.key, before, n, at, call.tool, call.args, reply)
        if not isinstance(found, str) or not hmac.compare_digest(found.encode(), before.encode()):
            return [*problems, Problem("seal", f"{call.tool} ({call.id!r}) was edited: its seal does not match")]
        call.at = at
    if before != chain.last:
        problems.append(Problem("seal", "the last seal in the transcript is not the last one that the server issued"))
    problems += [Problem("seal", f"the seal {n} was never issued by the server") for n in sealed]
    return problems


def _numbered(calls: Iterable[Call]) -> tuple[dict[int, Call], list[Problem]]:
    """Return the calls by the number in their seal, and a list of replies whose number is missing or repeated."""
    sealed: dict[int, Call] = {}
    problems = []
    for call in calls:
        # The call was denied, timed out or interrupted, so the server sent no reply to seal.
        unanswered = call.done_seq is None or (call.ok is False and not isinstance(call.result, dict))
        if not call.ours or unanswered:
            continue
        seal = call.result.get(FIELD) if isinstance(call.result, dict) else None
        n = seal.get("n") if isinstance(seal, dict) else None
        if not isinstance(n, int) or isinstance(n, bool):
            problems.append(Problem("seal", f"the reply to {call.tool} ({call.id!r}) has no seal: it was invented"))
        elif n in sealed:
            problems.append(Problem("seal", f"two replies have the seal {n}"))
        else:
            sealed[n] = call
    return sealed, problems
