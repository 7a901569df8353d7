"""Trials on disk. The runner writes them and the scorer reads them; runner and scorer share nothing else.

RUN/run.json                    agent, cases, trials, arm, model, harness, pack (digest), bare (the only server)
RUN/<case>/<n>/trial.json       case, n, seed, infra ("" or the failure), digests, seals {key, count, last}, files, mac
RUN/<case>/<n>/transcript.*     as the agent's harness wrote it, in any format that can be read
RUN/<case>/<n>/end_state.json   the end state
RUN/<case>/<n>/ledger.jsonl     the server's own ledger, if any (see ledger_check.py)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from evals.errors import EvalError
from evals.scoring import ledger_check, trial_file
from evals.scoring.cases import Case
from evals.scoring.endstate import EndState
from evals.scoring.endstate import read as read_end
from evals.scoring.verdict import Score, Verdict, score
from evals.transcripts.canonical import Meta, Problem, Transcript
from evals.transcripts.loaders import read
from evals.transcripts.seals import Chain

_RUN_KEYS: Final = frozenset({"agent", "arm", "model", "harness", "pack", "bare", "trials", "cases"})
_REMEDY: Final = "See evals/README.md, 'Trials on disk'"


@dataclass(frozen=True)
class Run:
    """One run: an agent in one arm on a list of cases, with `trials` trials of each case."""

    folder: Path
    agent: str
    cases: tuple[str, ...]
    arm: str = "pack"
    model: str = ""
    harness: str = ""
    pack: str = ""
    bare: str | None = None
    trials: int = 1


@dataclass(frozen=True)
class Trial:
    """One scored trial, with the digests of its inputs."""

    case: str
    n: int
    score: Score
    transcript: Transcript
    digests: dict[str, str] = field(default_factory=dict)
    sealed: bool = False
    """Whether the server's replies are sealed. A transcript without seals is not verified."""

    @property
    def key(self) -> tuple[str, int]:
        """Return the case and the number, which identify the trial in its run."""
        return self.case, self.n


def read_run(folder: Path) -> Run:
    """Return the metadata of a run. Raises EvalError if `run.json` is missing or has unknown keys."""
    path = folder / "run.json"
    value = _json(path)
    for key in sorted(value.keys() - _RUN_KEYS):
        raise EvalError(f"a run can't have the key {key!r}", _REMEDY, file=path)
    if not isinstance(value.get("agent"), str) or not isinstance(value.get("cases"), list) or not value["cases"]:
        raise EvalError("a run needs an agent and the list of its cases", _REMEDY, file=path)
    return Run(folder, **{**value, "cases": tuple(value["cases"])})


def score_run(run: Run, cases: dict[str, Case]) -> list[Trial]:
    """Score every expected trial of the run. A missing trial is scored as INFRA, never dropped."""
    strays = {p.name for p in run.folder.iterdir() if p.is_dir()} - set(run.cases)
    for id in (*run.cases, *sorted(strays)):  # noqa: A001
        if id not in cases or id in strays:
            remedy = "Restore the case, or remove it from the run's list and folder"
            raise EvalError(f"the case {id!r} is unknown, or not in the run's list", remedy, file=run.folder)
    wanted = [(cases[id], n) for id in run.cases for n in range(1, run.trials + 1)]  # noqa: A001
    return [score_trial(run, case, n) for case, n in wanted]


def score_trial(run: Run, case: Case, n: int) -> Trial:
    """Score one trial of a run."""
    folder = run.folder / case.id / str(n)
    if not (folder / trial_file.NAME).is_file():
        return _infra(case, n, "the trial is missing")
    head = _json(folder / trial_file.NAME)
    infra = str(head.get("infra") or "")
    paths = sorted(folder.glob("transcript.*"))
    if not paths:
        return _infra(case, n, infra or "no transcript was recorded")
    transcripts = read(paths[0], bare=run.bare)
    transcript = transcripts[0]
    if len(transcripts) != 1 or len(paths) != 1:
        text = f"{len(paths)} files with {len(transcripts)} transcripts instead of one"
        transcript.problems.append(Problem("unreadable", text))
    chain = None
    if (seals := head.get("seals")) is not None:
        try:
            chain = Chain(bytes.fromhex(seals["key"]), int(seals["count"]), str(seals["last"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EvalError(f"the seals can't be read: {error!r}", _REMEDY, file=folder / trial_file.NAME) from error
    transcript.problems += trial_file.problems(folder, head, case.id, n)
    if chain is not None and isinstance(head.get("ledger"), dict):
        transcript.problems += ledger_check.problems(folder, head["ledger"], transcript.calls)
    end = read_end(folder / "end_state.json") if (folder / "end_state.json").is_file() else None
    found = score(case, transcript, end=end, infra=infra, chain=chain)
    digests = {str(k): str(v) for k, v in (head.get("digests") or {}).items()}
    return Trial(case.id, n, found, transcript, digests, sealed=chain is not None)


def score_file(case: Case, path: Path, *, end: EndState | None, format: str | None, bare: str | None) -> list[Trial]:  # noqa: A002
    """Score the transcripts of one file, each against one case."""
    found = read(path, format=format, bare=bare)
    return [Trial(case.id, n, score(case, t, end=end), t) for n, t in enumerate(found, 1)]


def _infra(case: Case, n: int, why: str) -> Trial:
    nothing = Transcript(Meta(), [], [], [])
    return Trial(case.id, n, Score(case.id, case.cluster, Verdict.INFRA, why, ()), nothing)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EvalError(f"can't be read: {error}", _REMEDY, file=path) from error
    if not isinstance(value, dict):
        raise EvalError("not a JSON object", _REMEDY, file=path)
    return value
