"""Export scored trials as an Inspect log, version 2, for Inspect's viewer and analysis tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from evals.reports.summary import Summary
from evals.scoring.cases import Case
from evals.scoring.trials import Trial
from evals.scoring.verdict import Verdict

SCORER = "gpuwarden_evals"
_ROLES = {"meta": "system"}


def export(summary: Summary, trials: Sequence[Trial], cases: dict[str, Case]) -> dict[str, Any]:
    """Return the log as a plain object; INFRA trials become samples with an error and without a score."""
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
    score = trial.score
    infra = score.verdict is Verdict.INFRA
    scored = {
        "value": "C" if score.verdict is Verdict.PASS else "I",
        "answer": trial.transcript.final_words()[:500],
        "explanation": score.why,
        "metadata": {"verdict": score.verdict.value, "failing": sorted(score.failing)},
    }
    sample: dict[str, Any] = {
        "id": trial.case,
        "epoch": trial.n,
        "input": case.prompt,
        "target": "",
        "messages": _messages(trial),
        "scores": {} if infra else {SCORER: scored},
        "metadata": {"cluster": case.cluster},
    }
    if infra:
        sample["error"] = {"message": score.why, "traceback": "", "traceback_ansi": ""}
    return sample


def _messages(trial: Trial) -> list[dict[str, Any]]:
    """List the messages, the calls and their results in chronological order."""
    rows: list[tuple[int, dict[str, Any]]] = [
        (say.seq, {"role": _ROLES.get(say.role, say.role), "content": say.text}) for say in trial.transcript.says
    ]
    for call in trial.transcript.calls:
        name = f"mcp__{call.server}__{call.tool}" if call.server else call.tool
        made = {"id": call.id, "function": name, "arguments": call.args, "type": "function"}
        rows.append((call.seq, {"role": "assistant", "content": "", "tool_calls": [made]}))
        if call.done_seq is not None:
            content = call.result if isinstance(call.result, str) else json.dumps(call.result)
            row = {"role": "tool", "tool_call_id": call.id, "function": name, "content": content}
            error = {"error": {"type": "unknown", "message": content[:2000]}} if call.ok is False else {}
            rows.append((call.done_seq, row | error))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
