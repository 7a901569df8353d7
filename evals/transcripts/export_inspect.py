"""Scored trials as an Inspect log, version 2, so that its viewer and its analyses can be used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from evals.reports.summary import Summary
from evals.scoring.cases import Case
from evals.scoring.trials import Trial
from evals.scoring.verdict import Verdict
from evals.transcripts.canonical import Call, Say

SCORER = "gpuwarden_evals"
_ROLES = {"meta": "system"}


def export(summary: Summary, trials: Sequence[Trial], cases: dict[str, Case]) -> dict[str, Any]:
    """The log as a plain object; INFRA trials are samples with an error and no score."""
    samples = [_sample(trial, cases[trial.case]) for trial in trials]
    model = summary.run.model or f"none/{summary.run.agent}"
    rate = summary.rate
    metrics = {"accuracy": {"name": "accuracy", "value": rate.value if rate else 0.0, "params": {}}}
    scored = [s for s in samples if s["scores"]]
    spec = {
        "eval_id": summary.run.folder.name,
        "run_id": summary.run.folder.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "task": "gpuwarden",
        "task_id": "gpuwarden",
        "model": model,
        "dataset": {"name": "cases.jsonl", "samples": len(summary.rows)},
        "config": {"epochs": summary.run.trials},
    }
    score = {"name": SCORER, "scorer": SCORER, "params": {}, "metrics": metrics}
    results = {"total_samples": len(samples), "completed_samples": len(scored), "scores": [score]}
    return {"version": 2, "status": "success", "eval": spec, "results": results, "samples": samples}


def _sample(trial: Trial, case: Case) -> dict[str, Any]:
    infra = trial.score.verdict is Verdict.INFRA
    sample: dict[str, Any] = {
        "id": trial.case,
        "epoch": trial.n,
        "input": case.prompt,
        "target": "",
        "messages": _messages(trial),
        "scores": {} if infra else {SCORER: _score(trial)},
        "metadata": {"cluster": case.cluster, "world": case.world},
    }
    if infra:
        sample["error"] = {"message": trial.score.why, "traceback": "", "traceback_ansi": ""}
    return sample


def _score(trial: Trial) -> dict[str, Any]:
    value = "C" if trial.score.verdict is Verdict.PASS else "I"
    failing = sorted(trial.score.failing)
    metadata = {"verdict": trial.score.verdict.value, "failing": failing}
    return {"value": value, "answer": trial.transcript.final_words()[:500], "explanation": trial.score.why} | {
        "metadata": metadata
    }


def _messages(trial: Trial) -> list[dict[str, Any]]:
    rows: list[tuple[int, dict[str, Any]]] = [(s.seq, _say(s)) for s in trial.transcript.says]
    for call in trial.transcript.calls:
        rows.append((call.seq, _call(call)))
        if call.done_seq is not None:
            rows.append((call.done_seq, _result(call)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _say(say: Say) -> dict[str, Any]:
    return {"role": _ROLES.get(say.role, say.role), "content": say.text}


def _call(call: Call) -> dict[str, Any]:
    made = {"id": call.id, "function": _name(call), "arguments": call.args, "type": "function"}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def _result(call: Call) -> dict[str, Any]:
    content = call.result if isinstance(call.result, str) else json.dumps(call.result)
    row = {"role": "tool", "tool_call_id": call.id, "function": _name(call), "content": content}
    return row if call.ok is not False else {**row, "error": {"type": "unknown", "message": content[:2000]}}


def _name(call: Call) -> str:
    return f"mcp__{call.server}__{call.tool}" if call.server else call.tool
