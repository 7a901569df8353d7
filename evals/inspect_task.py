"""Run the cases as an Inspect AI task.

Inspect supplies the models and the loop; this package supplies the scenarios and the verdicts.

    inspect eval evals/inspect_task.py --model openai/gpt-5 -T cases=teardown -T arm=pack --epochs 5

Trials are run and scored like all others: the runner opens the scenario, seals the calls, and writes to the folder in
`-T folder=RUN`, which `python -m evals score RUN` can also read. No other module in this package imports this module.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # needed because Inspect loads a task by its path

import anyio.from_thread
import anyio.to_thread
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageTool, ChatMessageUser, execute_tools, get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolDef, ToolParams
from inspect_ai.util import LimitExceededError

from evals.environments.stage import OpenScene, stage
from evals.errors import EvalError
from evals.harness import runner
from evals.harness.recorder import LimitReached, Recorder, SceneDied
from evals.harness.skill_pack import Pack, load_pack
from evals.harness.skill_tool import DESCRIPTION, PARAMETERS, SKILL, read_skill, system
from evals.harness.tool_schemas import Shown, shown
from evals.scoring.cases import Case, load_cases
from evals.scoring.digests import of_pack
from evals.scoring.surface import HERE
from evals.scoring.trials import Run, score_trial
from evals.scoring.verdict import Verdict
from evals.transcripts.export_inspect import SCORER

EXTRA_TURNS = 20
MOST_INFRA = 0.05
"""Maximum share of trials that may fail for reasons unrelated to the agent. Above it, the run is inconclusive."""


@task
def gpuwarden(stage_name: str = "gated", cases: str = "", arm: str = "none", pack: str = "", folder: str = "") -> Task:
    """Return the task for all cases, or for those named by id or cluster in the comma-separated `cases`."""
    shelf = load_pack(arm, Path(pack) if pack else None)
    where = Path(folder or tempfile.mkdtemp(prefix="evals-inspect-"))
    return make_task(chosen(load_cases(), cases), stage(stage_name), shelf, where)


def chosen(cases: dict[str, Case], wanted: str) -> dict[str, Case]:
    """Return the cases with these ids and clusters; all cases if no names are given.

    Raises EvalError for an unknown name.
    """
    found = dict(cases) if not wanted else {}
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        fitting = {c.id: c for c in cases.values() if name in (c.id, c.cluster)}
        if not fitting:
            raise EvalError(f"no case or cluster is called {name!r}", "`python -m evals cases` lists them")
        found |= fitting
    return found


def make_task(cases: dict[str, Case], open_scene: OpenScene, pack: Pack, folder: Path) -> Task:
    """Return the task for the given cases."""
    run = Run(folder, "inspect", tuple(cases), arm=pack.arm, harness="inspect", pack=of_pack(HERE.parent))
    stand = SharedState(run, cases, open_scene, pack)
    about = [{"cluster": c.cluster, "variant": c.variant} for c in cases.values()]
    samples = [Sample(id=c.id, input=c.prompt, metadata=m) for c, m in zip(cases.values(), about, strict=True)]
    dataset = MemoryDataset(samples, name="cases.jsonl")
    return Task(dataset=dataset, solver=in_scenario(stand), scorer=gpuwarden_evals(stand), fail_on_error=MOST_INFRA)


@dataclass(frozen=True)
class SharedState:
    """The state that the solver and the scorer share."""

    run: Run
    cases: dict[str, Case]
    open_scene: OpenScene
    pack: Pack


@solver
def in_scenario(stand: SharedState) -> Solver:
    """Let the model work in the sample's scenario until it makes no more calls."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        case = stand.cases[str(state.sample_id)]
        folder = stand.run.folder / case.id / str(state.epoch)

        def play(_: Case, recorder: Recorder) -> None:
            offer = shown(*recorder.scene.server())
            anyio.from_thread.run(partial(Conversation(state, recorder, offer, stand.pack).run))

        # The runner waits for processes, so it runs in a thread. The conversation with the model runs in this
        # loop.
        await anyio.to_thread.run_sync(runner.trial, case, state.epoch, folder, play, stand.open_scene)
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()], name=SCORER)
def gpuwarden_evals(stand: SharedState) -> Scorer:
    """Return a scorer that gives the trial's verdict.

    If the scenario or the model failed, the sample gets an error instead.
    """

    async def score(state: TaskState, target: Target) -> Score:
        trial = score_trial(stand.run, stand.cases[str(state.sample_id)], state.epoch)
        if trial.score.verdict is Verdict.INFRA:
            raise RuntimeError(trial.score.why)
        about = {"verdict": trial.score.verdict.value, "failing": sorted(trial.score.failing)}
        value = "C" if trial.score.verdict is Verdict.PASS else "I"
        words = trial.transcript.final_words()[:500]
        return Score(value=value, answer=words, explanation=trial.score.why, metadata=about)

    return score


class Conversation:
    """One session between a model and the server."""

    def __init__(self, state: TaskState, recorder: Recorder, offer: Shown, pack: Pack) -> None:
        self.state, self.recorder, self.offer, self.pack = state, recorder, offer, pack
        self._over: Exception | None = None
        self._reached = 0

    async def run(self) -> None:
        """Run turns of the model until a turn has no call. Raises LimitReached if the model does not stop."""
        system_text = system(self.offer, self.pack)
        self.state.messages = [ChatMessageSystem(content=system_text), ChatMessageUser(content=self.recorder.prompt)]
        tools = [self._tool(t["name"], t.get("description", ""), t["inputSchema"]) for t in self.offer.tools]
        if self.pack.skills:
            tools.append(self._tool(SKILL, DESCRIPTION, PARAMETERS))
        try:
            for _ in range(self.recorder.max_calls + EXTRA_TURNS):
                if not await self._turn(tools):
                    return
        except LimitExceededError as error:  # one of Inspect's own limits was reached
            raise LimitReached from error
        raise LimitReached

    async def _turn(self, tools: list[ToolDef]) -> bool:
        """Run one turn of the model and answer its calls. Return whether it made calls."""
        output = await get_model().generate(self.state.messages, tools)
        self.state.output = output
        self.state.messages.append(output.message)
        self.recorder.used(model=output.model, turns=1)
        if output.usage is not None:
            self.recorder.used(tokens=output.usage.total_tokens)
        if output.message.text:
            self.recorder.say(output.message.text)
        if not output.message.tool_calls:
            return False
        before = self._reached
        answers = (await execute_tools(self.state.messages, tools)).messages
        self.state.messages += answers
        # Also record the calls that Inspect rejected (an unknown tool, invalid arguments), because the model made them.
        calls = {call.id: call for call in output.message.tool_calls}
        failed = [(m, m.error) for m in answers if isinstance(m, ChatMessageTool) and m.error is not None]
        turned_away = [(m.tool_call_id or "", error) for m, error in failed if error.type == "parsing"]
        assert self._reached - before + len(turned_away) <= len(calls)
        for call_id, error in turned_away:
            id, _ = self.recorder.begin(calls[call_id].function, calls[call_id].arguments)  # noqa: A001
            self.recorder.answered(id, str(error.message), ok=False)
        if self._over is not None:
            raise self._over
        return True

    def _tool(self, name: str, description: str, schema: dict[str, Any]) -> ToolDef:
        async def execute(**args: Any) -> str:
            self._reached += 1

            def work() -> str:
                if name == SKILL:
                    return read_skill(self.recorder, self.pack, args)
                return json.dumps(self.recorder.call(name, args), ensure_ascii=False)

            try:
                return await anyio.to_thread.run_sync(work)
            except (LimitReached, SceneDied) as error:  # raised for the runner, not for Inspect
                self._over = error
                return "no more calls"

        return ToolDef(execute, name=name, description=description, parameters=ToolParams.model_validate(schema))
