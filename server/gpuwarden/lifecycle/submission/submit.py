"""The submit gate: facts are gathered, rules read them, a receipt is bound to both, and only then is a job accepted."""

from __future__ import annotations

import hashlib
import secrets as random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from anyio import to_thread

from gpuwarden.backends.base import Confining, Optioned
from gpuwarden.core.errors import BadRequest, Conflict, NotFound, NotSupported, Refused
from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.models import JobSpec, Quote, Unknown, digest
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.rules import Finding, run_rules
from gpuwarden.core.sanitize import line, scrubbed, secret_values
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.ledger.events import JobAccepted, JobRefused, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.orders import order_for
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.records import JobRecord, job_ids, read_job, read_receipt
from gpuwarden.lifecycle.submission.budgets import spending_approved, spending_question
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.lifecycle.submission.input_store import stage, sweep
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import SubmitFacts

ANOTHER_RECEIPT: Final = do(Action.SUBMIT, "for a fresh receipt", receipt="")


@dataclass(frozen=True)
class Submission:
    """Result of a submit. `job` is None while nothing was accepted: then `receipt` launches it.

    `ask` says why a person has to approve the spending first; empty when nobody has to.
    """

    findings: tuple[Finding, ...]
    quote: Quote | None = None
    worst_cost_usd: float | None = None
    receipt: str | None = None
    expires_at: float | None = None
    ask: str = ""
    job: JobRecord | None = None
    adopted: bool = False
    next_steps: tuple[NextStep, ...] = ()
    """What remains to do for the job, the next step first."""


@dataclass(frozen=True)
class _Checked:
    facts: SubmitFacts
    findings: tuple[Finding, ...]
    quote: Quote | None = field(default=None)


async def submit(ctx: Context, spec: JobSpec, *, dry_run: bool = False, receipt: str | None = None) -> Submission:
    """Check a job, and launch it when that is allowed.

    On a metered platform the first call returns a receipt and launches nothing; the second call, with that receipt
    and the same arguments, launches. Raises Refused with the findings, NotFound or Conflict for a receipt that is
    not ours, stale or for something else, BadRequest for a dry run that brings one.
    """
    if receipt is not None and dry_run:
        raise BadRequest("a dry run only checks, and a receipt launches; nothing was done", "Leave one of them out.")
    spec = _settled(ctx, spec)
    if receipt is not None:
        return await _redeem(ctx, spec, receipt)
    checked = await _check(ctx, spec)
    live = _live_twin(ctx, checked.facts)
    if live is not None and not dry_run:
        job = await advance(ctx, live)
        cost, rest = checked.facts.worst_cost, following(ctx, job)
        return Submission(checked.findings, checked.quote, cost, job=job, adopted=True, next_steps=rest)
    facts, ticket = checked.facts, f"r{random.token_hex(8)}"
    expires = ctx.clock.now() + ctx.policy.receipt_ttl_s
    ask = spending_question(ctx, facts)
    issued = ReceiptIssued(
        spec_digest=facts.spec.digest,
        facts_digest=facts.digest,
        price=facts.price,
        expires_at=expires,
        worst_cost=facts.worst_cost,
        name=facts.spec.name,
        platform=facts.spec.platform,
        timeout_s=facts.spec.timeout_s,
        ask=ask,
        hub=facts.hub.watched if facts.hub else {},
        inputs={file.path: file.sha256 for file in facts.inputs},
    )
    ctx.ledger.add(f"receipt/{ticket}", issued)
    if dry_run or facts.metered:
        return Submission(checked.findings, checked.quote, facts.worst_cost, ticket, expires, ask)
    return await _accept(ctx, checked, ticket)


def _settled(ctx: Context, spec: JobSpec) -> JobSpec:
    """Return the spec as its platform runs it. Raises BadRequest for options that the platform does not have."""
    try:
        backend = ctx.backend(ctx.profile(spec.platform).backend)
    except (NotFound, NotSupported):
        return spec  # a rule says so, among everything else
    if isinstance(backend, Optioned):
        return backend.settle(spec)
    if spec.options:
        raise BadRequest(
            f"{spec.platform} has no options, and {', '.join(sorted(spec.options))[:100]} was given",
            do(Action.LEAVE_OUT_ARGUMENT, name="options"),
        )
    return spec


async def _check(ctx: Context, spec: JobSpec) -> _Checked:
    """Gather the facts and let the rules read them. What blocks is recorded and raised as Refused."""
    try:
        profile = ctx.profile(spec.platform)
        backend = ctx.backend(profile.backend)
    except (NotFound, NotSupported):
        pass  # a rule says so, among everything else
    else:  # what may not or can't run on this machine is refused before anything is asked or rented
        if isinstance(backend, Confining):
            await backend.admit(spec, rehearsed=profile.provider is not None)
    facts = await gather(ctx, spec)
    findings = tuple(run_rules(rules_of("submit"), facts))
    rules = tuple(dict.fromkeys(f.rule for f in findings if f.blocks))
    if rules:
        # The spec may contain a secret, so only its digest is kept, and names that are not secret.
        names = scrubbed({"name": spec.name, "platform": spec.platform}, secret_values(ctx.env))
        refused = JobRefused(**names, spec_digest=spec.digest, rules=tuple(sorted(rules)))
        ctx.ledger.add(f"job/x{random.token_hex(5)}", refused)
        raise Refused(
            f"the submit gate refused {spec.name!r} ({', '.join(rules)}); nothing was launched or billed",
            ("Fix each finding as it says.", do(Action.RETRY)),
            findings,
        )
    quote = None if facts.quote is None or isinstance(facts.quote, Unknown) else facts.quote.value
    return _Checked(facts, findings, quote)


async def _redeem(ctx: Context, spec: JobSpec, receipt: str) -> Submission:
    """Launch what a receipt was issued for, once, when everything is still as it was checked."""
    issued = read_receipt(ctx.ledger, receipt).issued
    if issued.spec_digest != spec.digest:
        raise Conflict("the receipt is for other arguments", ANOTHER_RECEIPT)
    used = ctx.ledger.used(JobAccepted, receipt)
    if used is not None:  # a repeated call, perhaps after a lost reply
        job = await advance(ctx, used.subject.removeprefix("job/"))
        rest = following(ctx, job)
        return Submission((), worst_cost_usd=job.worst_cost, receipt=receipt, job=job, adopted=True, next_steps=rest)
    if ctx.clock.now() > issued.expires_at:
        raise Conflict("the receipt has expired: facts may have changed since", ANOTHER_RECEIPT)
    checked = await _check(ctx, spec)
    if checked.facts.digest != issued.facts_digest:
        change = _change(issued, checked)
        raise Conflict(f"what was checked has changed since the receipt: {change}", ANOTHER_RECEIPT)
    return await _accept(ctx, checked, receipt)


class NeedsApproval(Refused):
    """The spending is above what the user allowed without a question."""

    code = "approval_required"

    def __init__(self, message: str, ticket: str) -> None:
        super().__init__(message, (approval(ticket), do(Action.SUBMIT, receipt=ticket)))
        self.ticket = ticket


def _change(issued: ReceiptIssued, checked: _Checked) -> str:
    """Return what differs from the facts that a receipt is bound to."""
    before, now = issued.price, checked.facts.price
    if before != now:
        return f"the price was {usd_per_hour(before)} and is {usd_per_hour(now)}"
    listed, files = issued.inputs, {file.path: file.sha256 for file in checked.facts.inputs}
    if changed := sorted(path for path in {**listed, **files} if listed.get(path) != files.get(path)):
        return f"inputs are not the files that were checked: {line(', '.join(changed))}"
    then, seen = issued.hub, checked.facts.hub.watched if checked.facts.hub else {}
    moved = [
        f"{name} was {then.get(name)} and is {seen.get(name)}"
        for name in {**then, **seen}
        if then.get(name) != seen.get(name)
    ]
    return "; ".join(moved) or "the platform's profile or the secrets that have values"


async def _accept(ctx: Context, checked: _Checked, receipt: str) -> Submission:
    """Write the job down, once per receipt, and start it on its way."""
    spec = checked.facts.spec
    job_id = "j" + hashlib.sha256(receipt.encode()).hexdigest()[:10]
    accepted = JobAccepted(
        spec=spec,
        spec_digest=spec.digest,
        facts_digest=checked.facts.digest,
        worst_cost=checked.facts.worst_cost,
        price=checked.facts.price,
        receipt=receipt,
        script_digest="" if spec.script is None else digest(spec.script),
        inputs=checked.facts.inputs,
    )
    async with ctx.lock("submit"):  # so that two processes don't both find no twin, or the same room below a cap
        used = ctx.ledger.used(JobAccepted, receipt)
        live = used.subject.removeprefix("job/") if used else _live_twin(ctx, checked.facts)
        if live is None:
            ask = spending_question(ctx, checked.facts)
            if ask and not spending_approved(ctx, receipt):
                raise NeedsApproval(f"a person has to approve this spending first: {ask}", receipt)
            # Take the bytes that were checked, before the job is accepted; drop those that no live job needs.
            inputs = checked.facts.inputs
            kept = [inputs, *(read_job(ctx.ledger, name).inputs for name in _live_jobs(ctx))]
            await to_thread.run_sync(sweep, ctx.input_store, {file for files in kept for file in files})
            if inputs:
                await to_thread.run_sync(stage, ctx.input_store, ctx.cwd or Path.cwd(), inputs)
            with ctx.ledger.transaction():
                ctx.ledger.add(f"job/{job_id}", accepted, token=receipt)
                if checked.facts.metered and (order := order_for(ctx, receipt)) is not None:
                    ctx.ledger.add(f"job/{job_id}", order)
    job = await advance(ctx, live or job_id)
    cost, rest = checked.facts.worst_cost, following(ctx, job)
    return Submission(
        checked.findings, checked.quote, cost, receipt, job=job, adopted=live is not None, next_steps=rest
    )


def _live_jobs(ctx: Context) -> list[str]:
    return job_ids(ctx.ledger, *(s for s in Job if s not in TERMINAL_JOBS))


def _live_twin(ctx: Context, facts: SubmitFacts) -> str | None:
    """Return a job with exactly these arguments and inputs that has not ended: the same call, made twice."""
    wanted = facts.spec.digest, facts.inputs
    for job_id in _live_jobs(ctx):
        accepted = ctx.ledger.last(f"job/{job_id}", JobAccepted)
        if accepted is not None and (accepted.data.spec_digest, accepted.data.inputs) == wanted:
            return job_id
    return None
