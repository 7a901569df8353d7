"""Derive the user's request from a case, without the precautions that its solution needs.

Scripted agents that do harm need the user's request, not the solution. The request is derived from the reference
transcripts of the case and its variant, which have the same prompt: the prompt asks for the launches, pulls and
teardowns in these transcripts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from evals.harness.recorder import Recorder
from evals.scoring.cases import Case, load_cases
from evals.selftest.reference_transcript import reference
from evals.transcripts.canonical import Call


@dataclass(frozen=True)
class CaseContext:
    """The user's request in a case.

    `launches` are arguments of `submit_job`; `verb` is the teardown verb, or "" to keep the machine.
    """

    launches: tuple[dict[str, Any], ...]
    verb: str
    pull_to: str
    job: str
    """The key of the fact that contains the id of the job in the prompt; "" if the prompt does not name a job."""
    cleans: bool
    """True if the user asked to terminate everything that is billed."""


@cache
def _calls(id: str) -> tuple[Call, ...]:  # noqa: A002
    return tuple(c for c in reference(load_cases()[id]).transcript().calls if c.ours)


def case_context(case: Case) -> CaseContext:
    """Return the user's request in a case."""
    mine, both = _calls(case.id), (*_calls(case.id), *_calls(case.variant))
    pulls = [str(c.args.get("dest", "out")) for c in both if c.tool == "pull_artifacts"]
    ends = [str(c.args["verb"]) for c in both if c.tool == "teardown_request"]
    named = [f for f in ("job", "old", "base") if f"{{{f}}}" in case.prompt]
    return CaseContext(
        launches=tuple(_launches(mine) or _launches(both)),
        verb=ends[0] if ends else "",
        pull_to=pulls[0] if pulls else "",
        job=named[0] if named else "",
        cleans="forgotten" in case.prompt,
    )


Act = Callable[[Recorder, CaseContext, str], None]
"""A function that runs an agent. The last argument is the id of the job in the prompt, or "" if there is none."""


def run_case(case: Case, recorder: Recorder, gated: Act, raw: Act) -> None:
    """Run a case with the function for its stage: `gated` for a stage with gates, `raw` for a stage without gates."""
    wanted = case_context(case)
    act = raw if recorder.raw else gated
    act(recorder, wanted, str(recorder.scene.facts.get(wanted.job, "")))


def raw_launch(recorder: Recorder, args: dict[str, Any], name: str) -> bool:
    """Rent a machine and run a script on it; retry once if a reply is lost. Return whether the script was started."""
    asked: dict[str, Any] = {"platform": args["platform"], "name": name, "gpu": args.get("gpu")}
    made = recorder.call("create_instance", asked)
    if made.get("code") == "unreachable":
        made = recorder.call("create_instance", asked)
    if made.get("ok") is not True:
        return False
    more: dict[str, Any] = {k: args[k] for k in ("args", "env") if k in args}
    run = {"platform": args["platform"], "instance_id": made["instance_id"], "script": args["script"], **more}
    return recorder.call("run_script", run).get("ok") is True


def _launches(calls: tuple[Call, ...]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for call in calls:
        args = {k: v for k, v in call.args.items() if k not in ("dry_run", "receipt")}
        if call.tool == "submit_job" and args not in found:
            found.append(args)
    return found
