"""The reply of submit_job."""

from __future__ import annotations

from pydantic import Field

from gpuwarden.core.guidance import Action, approval, do, steps
from gpuwarden.core.money import at_most
from gpuwarden.core.reasons import Code
from gpuwarden.core.sanitize import quoted
from gpuwarden.core.states import Job
from gpuwarden.interfaces.results.base import FindingReply, WarnedReply, findings
from gpuwarden.lifecycle.submission.submit import Submission


class SubmitReply(WarnedReply):
    """`job_id` is set once the job is accepted; before that, `receipt` is what to submit again with."""

    job_id: str | None = None
    state: str | None = None
    adopted: bool = False
    receipt: str | None = None
    receipt_expires_at: float | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None
    worst_cost_usd: float | None = Field(
        default=None, description="The job, at most; its machine bills on until a person approves its end"
    )
    findings: list[FindingReply] = Field(default_factory=list)


def submitted(result: Submission) -> SubmitReply:
    """Return the reply to submit_job."""
    reply = SubmitReply(
        findings=findings(result.findings),
        receipt=None if result.job else result.receipt,
        receipt_expires_at=None if result.job else result.expires_at,
        price_usd_per_hour=result.quote.price_usd_per_hour if result.quote else None,
        price_source=quoted(result.quote.source) if result.quote else None,
        worst_cost_usd=result.worst_cost_usd,
        adopted=result.adopted,
    )
    bound = f" It costs {at_most(result.worst_cost_usd)}." if result.worst_cost_usd else ""
    launch = do(Action.SUBMIT, "to launch", receipt=result.receipt or "")
    if result.job is not None:
        job = result.job
        reply.job_id, reply.state = job.id, job.state
        reply.code = "adopted" if result.adopted else "accepted"
        same = "The same job was submitted before and is this one. " if result.adopted else ""
        reply.message = f"{same}Job {job.id} {job.state.told}" + (f" ({quoted(job.why)})." if job.why else ".")
        reply.next = (do(Action.CHECK, "; it does not wait", job_id=job.id),)
        if job.reason is Code.REFUSAL_UNSETTLED:
            reply.next = result.next_steps
        if job.state is Job.FAILED and job.handle is None:  # nothing was to be had, and nothing ran
            reply.ok, reply.code = False, "failed"
            reply.next = steps(("Nothing runs. Change what the message names.", do(Action.SUBMIT, receipt="")))
    elif result.ask:
        reply.code = "approval_required"
        reply.message = f"Checked; nothing was launched. A person has to approve the spending: {result.ask}.{bound}"
        reply.next = (approval(result.receipt), launch)
    else:
        reply.code = "checked"
        reply.message = f"Checked; nothing was launched.{bound}"
        reply.next = (launch,)
    return reply
