"""Reply to a rehearsal: the result of the script's first step. Untrusted text is fenced and limited in length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.sanitize import fence, named, quoted
from gpuwarden.interfaces.results.base import SHOWN, Result

if TYPE_CHECKING:
    from gpuwarden.lifecycle.submission.rehearsing import Rehearsal

LOG = 1_500


class RehearsalReply(Result):
    """The result of a script's first step.

    `outcome` is `passed`, `fault` (an error in the script, with its line) or `stopped` (the script could not be
    rehearsed; the message contains the reason). `substitutes` lists the replaced parts, such as models. The reply
    comes from the process that runs the script, so none of it is verified.
    """

    outcome: Literal["passed", "fault", "stopped"]
    certain: bool = False
    line: int | None = None
    source: str = ""
    reached: list[str] = Field(default_factory=list)
    substitutes: list[str] = Field(default_factory=list)
    lacking: list[str] = Field(default_factory=list)
    steps: int = 0
    resumed: bool | None = None
    saved: list[str] = Field(default_factory=list)
    pushed: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_mb: float = 0.0
    log: str = ""


def rehearsed(found: Rehearsal, values: tuple[str, ...] = ()) -> RehearsalReply:
    """Return the reply to a rehearsal; `values` are the secrets to redact in the log."""
    outcome = found.outcome
    reply = RehearsalReply(
        outcome=outcome.outcome,
        certain=outcome.certain,
        line=outcome.line or None,
        source=quoted(outcome.text, 200),
        reached=[named(stage, 20) for stage in outcome.reached],
        substitutes=[quoted(f"{what}: {by}", 200) for what, by in list(outcome.substitutes.items())[:SHOWN]],
        lacking=[quoted(name, 80) for name in found.lacking[:SHOWN]],
        steps=outcome.steps,
        resumed=outcome.resumed,
        saved=[named(name, 200) for name in outcome.files[:SHOWN]],
        pushed=[named(name, 200) for name in outcome.pushed],
        seconds=round(outcome.seconds, 1),
        cpu_s=round(outcome.cpu_s, 1),
        peak_mb=round(outcome.peak_mb),
    )
    last = f" after {reply.reached[-1]}" if reply.reached else ""
    if outcome.outcome == "passed":
        reply.message = "The script's first step completed on this machine, with small models on the CPU."
        if outcome.why:
            reply.message = f"The script's first step ran on this machine: {quoted(outcome.why)}."
    elif outcome.outcome == "fault":
        reply.ok, reply.code = False, "fault"
        where = f" at line {outcome.line}" if outcome.line else ""
        reply.message = f"The script fails{where}{last}: {quoted(outcome.message, 600)}"
        reply.next = (do(Action.MANUAL, text="Fix the error at that line."), do(Action.REHEARSE, "to run it again"))
    else:
        reply.ok, reply.code = False, "inconclusive"
        message = f" Its message: {quoted(outcome.message, 400)}" if outcome.message not in ("", outcome.why) else ""
        reply.message = f"The script could not be rehearsed{last}: {quoted(outcome.why, 400)}.{message}"
    if outcome.outcome != "passed" and outcome.log.strip():
        reply.log = fence(outcome.log, "the script's output", limit=LOG, values=values)
    return reply
