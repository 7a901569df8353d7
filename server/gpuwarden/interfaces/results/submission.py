"""The reply of submit_job."""

from __future__ import annotations

from pydantic import Field

from gpuwarden.core.errors import by_a_person
from gpuwarden.core.money import at_most
from gpuwarden.core.sanitize import quoted
from gpuwarden.core.states import Job
from gpuwarden.interfaces.results.base import FindingReply, WarnedReply, findings
from gpuwarden.lifecycle.records import JobRecord
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
    """A reply to submit_job."""
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
    if result.job is not None:
        _tell_of_job(reply, result, result.job)
    elif result.ask:
        reply.code = "approval_required"
        reply.message = f"Checked; nothing was launched. A person has to approve the spending: {result.ask}.{bound}"
        reply.hint = f"{by_a_person(result.receipt)}; then submit the same arguments again with this receipt."
    else:
        reply.code = "checked"
        reply.message = f"Checked; nothing was launched.{bound}"
        reply.hint = "To launch, submit the same arguments again with this receipt."
    return reply


def _tell_of_job(reply: SubmitReply, result: Submission, job: JobRecord) -> None:
    """Say what became of the launch."""
    reply.job_id, reply.state = job.id, job.state
    reply.code = "adopted" if result.adopted else "accepted"
    same = "The same job was submitted before and is this one. " if result.adopted else ""
    reply.message = f"{same}Job {job.id} {job.state.told}" + (f" ({quoted(job.why)})." if job.why else ".")
    reply.hint = "Call check_job; it does not wait."
    if job.state is Job.FAILED and job.handle is None:  # nothing was to be had, and nothing ran
        reply.ok, reply.code = False, "failed"
        reply.hint = "Nothing runs. Change what the message names, and submit anew for a new receipt."
