"""Reply to submit_job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from gpuwarden.core.guidance import Action, approval, do, steps
from gpuwarden.core.models import Verb
from gpuwarden.core.money import at_most, bills_on
from gpuwarden.core.reasons import Code
from gpuwarden.core.sanitize import quoted
from gpuwarden.core.states import Job
from gpuwarden.interfaces.results.base import FindingReply, WarnedReply, findings
from gpuwarden.interfaces.results.cells import FanOutReply
from gpuwarden.interfaces.results.rehearsal import rehearsed

if TYPE_CHECKING:
    from gpuwarden.lifecycle.submission.submit import Submission


class ChoiceReply(BaseModel):
    """One of the platforms on which a job may run, with its cost. Null means unknown."""

    platform: str
    gpu: str | None
    price_usd_per_hour: float | None
    worst_cost_usd: float | None


class SubmitReply(WarnedReply):
    """The result of a submission. `job_id` is set once the job is accepted; until then, submit again with `receipt`."""

    job_id: str | None = None
    state: str | None = None
    adopted: bool = False
    receipt: str | None = None
    receipt_expires_at: float | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    worst_cost_usd: float | None = Field(
        default=None,
        description="Maximum cost of the job; its machine is billed until an approved or automatic teardown",
    )
    automatic_teardown: Verb | None = Field(default=None, description="How automatic teardown ends the machine")
    storage: list[str] = Field(default_factory=list)
    """Names of storage that is still billed after teardown."""
    storage_usd_per_hour: float | None = None
    fan_out: FanOutReply | None = None
    rehearsal: str = Field(default="", description="Result of the script's first step on this machine")
    choices: list[ChoiceReply] = Field(default_factory=list)
    """Platforms on which the job may run, in the order in which they are tried.

    The price and the cost above are then the highest among these platforms.
    """
    findings: list[FindingReply] = Field(default_factory=list)


def submitted(result: Submission) -> SubmitReply:
    """Return the reply to submit_job."""
    reply = SubmitReply(
        findings=findings(result.findings),
        receipt=None if result.job else result.receipt,
        receipt_expires_at=None if result.job else result.expires_at,
        price_usd_per_hour=result.price,
        price_source=quoted(result.quote.source) if result.quote else None,
        worst_cost_usd=result.worst_cost_usd,
        automatic_teardown=result.ordered,
        storage=list(result.storage),
        storage_usd_per_hour=result.quote.storage_usd_per_hour if result.quote else None,
        adopted=result.adopted,
        rehearsal=rehearsed(result.rehearsal).message if result.rehearsal else "",
        choices=[
            ChoiceReply(
                platform=choice.platform,
                gpu=choice.gpu,
                price_usd_per_hour=choice.price,
                worst_cost_usd=choice.worst_cost,
            )
            for choice in result.choices
        ],
    )
    stays = bills_on(result.storage, reply.storage_usd_per_hour)
    stays = f" {stays[0].upper()}{stays[1:]}." if stays else ""
    bound = f" It costs {at_most(result.worst_cost_usd, result.ordered)}." if result.worst_cost_usd else ""
    bound += stays
    launch = do(Action.SUBMIT, "to launch", receipt=result.receipt or "")
    if result.job is not None:
        job = result.job
        reply.job_id, reply.state = job.id, job.state
        reply.code = "adopted" if result.adopted else "accepted"
        same = "This job was already submitted, so no second one was created. " if result.adopted else ""
        reply.message = f"{same}Job {job.id} {job.state.phrase}" + (f" ({quoted(job.why)})." if job.why else ".")
        reply.message += f" Once everything is verified, automatic teardown {result.ordered}s its machine." * bool(
            result.ordered
        )
        reply.message += stays
        reply.next = (do(Action.CHECK, "; the call returns immediately", job_id=job.id),)
        if job.reason is Code.REFUSAL_UNSETTLED:
            reply.next = result.next_steps
        if job.state is Job.FAILED and job.handle is None:  # no machine was available, and nothing ran
            reply.ok, reply.code = False, "failed"
            reply.next = steps(
                ("Nothing is running. Fix the cause given in the message.", do(Action.SUBMIT, receipt=""))
            )
    elif result.ask:
        reply.code = "approval_required"
        reply.message = f"Checked; nothing was launched. The user has to approve the spending: {result.ask}.{bound}"
        reply.next = (approval(result.receipt), launch)
    else:
        reply.code = "checked"
        reply.message = f"Checked; nothing was launched.{bound}"
        reply.next = (launch,)
    return reply
