"""Measure how many transcripts per second one core scores, from file to verdict, against parsing their JSON only.

The transcript has 60 calls and about 280 KB, in Claude Code's format, which is the largest. Compare the ratio to a
plain `json.loads` of the same lines in the same run, not the rate: the ratio does not depend on the machine.

    python bench/evals.py [--seconds 3]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure
from evals.scoring.cases import load_cases
from evals.scoring.verdict import Verdict, score
from evals.selftest.reference_transcript import reference
from evals.transcripts.canonical import Transcript
from evals.transcripts.loaders import read

CASE = "nothing-undeclared"
CALLS, TARGET_BYTES = 60, 280_000


def session(folder: Path) -> Path:
    """Write a passing session of 60 calls, padded to 280 KB with tool results as in real sessions; return its path."""
    script = reference(load_cases()[CASE])
    rows = [_line(n, kind, content) for n, (kind, content) in enumerate(_talk(script.transcript()))]
    path = folder / "session.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def _talk(transcript: Transcript) -> list[tuple[str, Any]]:
    own = len(transcript.calls)
    pad = "def step(batch):\n    loss = model(**batch).loss\n    return loss\n" * (
        (TARGET_BYTES - 62_000) // (CALLS - own) // 64
    )
    talk: list[tuple[str, Any]] = [("user", transcript.says[0].text)]
    for n in range(CALLS - own):
        talk.append(
            ("assistant", [{"type": "tool_use", "id": f"r{n}", "name": "Read", "input": {"file_path": f"f{n}"}}])
        )
        talk.append(("user", [{"type": "tool_result", "tool_use_id": f"r{n}", "content": pad}]))
    for call in transcript.calls:
        name = f"mcp__{call.server}__{call.tool}"
        talk.append(("assistant", [{"type": "tool_use", "id": call.id, "name": name, "input": call.args}]))
        talk.append(("user", [{"type": "tool_result", "tool_use_id": call.id, "content": json.dumps(call.result)}]))
    return [*talk, ("assistant", [{"type": "text", "text": transcript.says[-1].text}])]


def _line(n: int, kind: str, content: Any) -> dict[str, Any]:
    usage = {"input_tokens": 3, "output_tokens": 120, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 80}
    message: dict[str, Any] = {"role": kind, "content": content}
    if kind == "assistant":
        message |= {"id": f"msg_{n % 12}", "type": "message", "model": "m", "stop_reason": None, "usage": usage}
    chain = {"uuid": f"u{n}", "parentUuid": f"u{n - 1}", "sessionId": "s", "isSidechain": False, "userType": "external"}
    place = {"cwd": "/home/u/project", "gitBranch": "main", "version": "2.0.0"}
    return {
        "type": kind,
        **chain,
        **place,
        "timestamp": f"2026-11-21T00:{n // 60:02d}:{n % 60:02d}.000Z",
        "message": message,
    }


def rate(work: Callable[[], object], seconds: float) -> float:
    """Return repetitions per second, the best of three rounds. CPU time excludes the load of other processes."""
    best = 0.0
    for _ in range(3):
        start, count = time.process_time(), 0
        while time.process_time() - start < seconds / 3:
            work()
            count += 1
        best = max(best, count / (time.process_time() - start))
    return best


def main() -> int:
    """Print the rates; return 1 if the verdict is wrong."""
    seconds = arguments(__doc__, {"seconds": (3.0, 0.3)}).seconds
    with tempfile.TemporaryDirectory() as folder:
        path = session(Path(folder))
        case, end = load_cases()[CASE], reference(load_cases()[CASE]).end_state()
        case = replace(case, limits={"tool_calls": 100}, checks=case.checks[:2])
        (transcript,) = read(path)
        verdict = score(case, transcript, end=end).verdict
        text = path.read_text("utf-8")
        whole = rate(lambda: [score(case, t, end=end) for t in read(path)], seconds)
        plain = rate(lambda: [json.loads(line) for line in text.split("\n") if line], seconds)
        checks = rate(lambda: score(case, transcript, end=end), seconds)
    size, calls, kinds = len(text) / 1000, len(transcript.calls), len(case.all_checks)
    print(f"session: {size:.0f} KB, {calls} calls, {kinds} checks, {verdict.value}")
    peer = f"json.loads alone {plain:.0f}/s"
    figure("transcripts that a core scores, from file to verdict", f"{whole:.0f}/s", peer, whole / plain)
    figure("the same without reading them", f"{checks:.0f}/s", peer, checks / plain)
    return 0 if verdict is Verdict.PASS else 1


if __name__ == "__main__":
    raise SystemExit(main())
