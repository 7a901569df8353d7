"""Run an agent through cases on a stage, and write the trials to disk. A failed trial is recorded, never dropped.

An agent is a module `agents/<name>.py`, found by its name. A scripted agent defines `play(case, recorder)`; it gets the
case, because the oracle follows the case's reference transcript. A real agent defines `make(setup)`, which returns such
a `play` function. It uses the prompt and the server, and reads only the limits from the case.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from evals.environments.stage import OpenScene, Scene
from evals.errors import EvalError
from evals.harness.recorder import AgentDied, LimitReached, Recorder, SceneDied
from evals.harness.setup import Setup
from evals.scoring import ledger_check, trial_file
from evals.scoring.cases import Case
from evals.scoring.digests import of_trial
from evals.scoring.surface import HERE
from evals.scoring.trials import Run

Play = Callable[[Case, Recorder], None]


def agents() -> list[str]:
    """Return the names of all agents, sorted."""
    return sorted(p.stem for p in (HERE / "agents").glob("[!_]*.py"))


def agent(name: str, setup: Setup | None = None) -> Play:
    """Return the agent with this name. Raises EvalError if the name is unknown or the agent's setup fails."""
    if name not in agents():
        raise EvalError(f"unknown agent {name!r}", f"The agents are {', '.join(agents())}")
    module = import_module(f"evals.agents.{name}")
    make: Callable[[Setup], Play] | None = getattr(module, "make", None)
    return make(setup or Setup()) if make else cast("Play", module.play)


def is_real(name: str) -> bool:
    """Return true if an agent uses a model and therefore needs a setup."""
    return hasattr(import_module(f"evals.agents.{name}"), "make")


def harness(name: str, setup: Setup) -> str:
    """Return the name and version of the program between the model and the server. Both are compared between runs."""
    program: str | None = getattr(import_module(f"evals.agents.{name}"), "PROGRAM", None)
    return f"{program} {setup.version(program)}".strip() if program else "evals"


def run(head: Run, play: Play, open_scene: OpenScene, cases: dict[str, Case], *, jobs: int = 1) -> None:
    """Run all trials of a run, `jobs` at a time. Existing trials are kept, so that a run can be resumed."""
    head.folder.mkdir(parents=True, exist_ok=True)
    value = {k: v for k, v in asdict(head).items() if k != "folder"}
    (head.folder / "run.json").write_text(json.dumps(value, indent=1), "utf-8")
    todo = [(n, head.folder / name / str(n), cases[name]) for name in head.cases for n in range(1, head.trials + 1)]
    with ThreadPoolExecutor(jobs) as pool:
        played = [
            pool.submit(trial, case, n, folder, play, open_scene)
            for n, folder, case in todo
            if not (folder / trial_file.NAME).is_file()
        ]
        try:
            for each in played:
                each.result()
        except BaseException:  # after Ctrl-C, for example, cancel the trials that have not started
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def trial(case: Case, n: int, folder: Path, play: Play, open_scene: OpenScene) -> None:
    """Run one trial. `trial.json` is written last, so a trial without this file is incomplete and is run again."""
    if folder.exists():  # files of an interrupted trial must not become part of this scenario
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    seed, key = case.scenario.seed * 1_000 + n, secrets.token_bytes(32)
    head: dict[str, Any] = {"case": case.id, "n": n, "seed": seed, "infra": "", "digests": of_trial(case)}
    try:
        scene = open_scene(case.scenario, seed, folder / "scene")
    except Exception as error:  # the agent is not responsible for a scenario that can't be opened
        head["infra"] = f"the scenario could not be opened: {error!r}"
    else:
        try:
            head |= _play(case, scene, key, folder, play)
        finally:
            scene.close()
    trial_file.write(folder, head)


def _play(case: Case, scene: Scene, key: bytes, folder: Path, play: Play) -> dict[str, Any]:
    limit = int(case.limits.get("tool_calls") or 60)
    clock = getattr(scene, "now", time.time)  # simulated scenarios have a separate clock
    recorder = Recorder(scene, case.request(scene.facts), key, limit, clock)
    ended, why, infra = "completed", "", ""
    try:
        play(case, recorder)
    except LimitReached:
        ended, why = "limit", f"{limit} calls"
    except (SceneDied, AgentDied) as error:
        ended, why, infra = "error", str(error), str(error)
    except Exception as error:  # a crash results in the verdict INFRA, not in a failed case
        ended, why, infra = "error", repr(error), f"the agent crashed: {error!r}"
    recorder.write(folder / "transcript.jsonl", ended, why)
    try:
        (folder / "end_state.json").write_text(json.dumps(scene.end()), "utf-8")
    except Exception as error:  # without an end state the trial can't be scored
        infra = infra or f"no end state: {error!r}"
    seals = {"key": key.hex(), "count": recorder.sealer.n, "last": recorder.sealer.last}
    head: dict[str, Any] = {"infra": infra, "seals": None if recorder.raw else seals}
    read_ledger = getattr(scene, "ledger", None)  # the raw stage has no server and therefore no ledger
    if read_ledger is not None and not infra:
        since, events = read_ledger()
        head["ledger"] = ledger_check.write(folder, events, since)
    return head


def new_run(
    folder: Path, name: str, arm: str, cases: Iterable[str], trials: int, pack: str, setup: Setup | None = None
) -> Run:
    """Return the metadata of a run, including the setup if the agent has one."""
    model, between = (setup.model, harness(name, setup)) if setup else ("", "evals")
    return Run(folder, name, tuple(cases), arm, model, between, pack, None, trials)
