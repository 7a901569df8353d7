"""The submit gate: gather facts, run the rules, bind a receipt to facts and findings, and only then accept a job."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets as random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import Final

from anyio import to_thread

from gpuwarden.backends.base import Optioned, SandboxBackend
from gpuwarden.core.errors import BadRequest, Conflict, NoSandbox, NotFound, NotSupported, Refused
from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.models import Choice, JobSpec, Quote, Unknown, Verb, digest
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.core.sanitize import line, scrubbed, secret_values
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.ledger.events import Body, JobAccepted, JobRefused, ReceiptIssued
from gpuwarden.lifecycle.context import CAPS, Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.relaunch import relaunch_for
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown, order_for
from gpuwarden.lifecycle.leases.budgets import spending_approved, spending_question
from gpuwarden.lifecycle.leases.self_stop import self_stop_for
from gpuwarden.lifecycle.records import JobRecord, job_ids, read_job, read_receipt
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.lifecycle.submission.input_store import stage, sweep
from gpuwarden.lifecycle.submission.rehearsing import Rehearsal, rehearse_script
from gpuwarden.lifecycle.team import check_receipt
from gpuwarden.providers.base import MachineOptionsProvider, Provider
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import SubmitFacts

ANOTHER_RECEIPT: Final = do(Action.SUBMIT, "to get a new receipt", receipt="")


class Checks(Enum):
    """The purpose of a check: a dry run, a receipt if the platform is metered, or a launch."""

    DRY_RUN = auto()
    RECEIPT = auto()
    LAUNCH = auto()


@dataclass(frozen=True)
class Submission:
    """Result of a submission. If `job` is None, the job has not been accepted yet, and `receipt` launches it.

    `ask` is the reason why the user must approve the spending first; empty if no approval is needed. `ordered` is the
    verb of automatic teardown; None if the user will be asked about the teardown.
    """

    findings: tuple[Finding, ...]
    quote: Quote | None = None
    worst_cost_usd: float | None = None
    receipt: str | None = None
    expires_at: float | None = None
    ask: str = ""
    ordered: Verb | None = None
    job: JobRecord | None = None
    adopted: bool = False
    next_steps: tuple[NextStep, ...] = ()
    """Remaining steps for the job, in order."""
    rehearsal: Rehearsal | None = None
    choices: tuple[Choice, ...] = ()
    """Platforms that the job may run on, in order, each with its price; empty for a job with one platform."""
    storage: tuple[str, ...] = ()
    """Names of the storage that is still billed after the machine is torn down."""

    @property
    def price(self) -> float | None:
        """Return the highest price per hour of all choices; None if one is unknown."""
        if self.choices:
            return _highest([choice.price for choice in self.choices])
        return self.quote.price_usd_per_hour if self.quote else None


@dataclass(frozen=True)
class CheckedSubmission:
    """A job that passed the submit gate: its facts, findings and quote.

    If the job may run on several platforms, `facts` belongs to the first platform that passed, `places` contains the
    facts of all platforms that passed, in order, and `asked` is the digest of the spec as submitted.
    """

    facts: SubmitFacts
    findings: tuple[Finding, ...]
    quote: Quote | None = field(default=None)
    asked: str = ""
    places: tuple[SubmitFacts, ...] = ()

    @property
    def spec_digest(self) -> str:
        """Return the digest of the spec as submitted."""
        return self.asked or self.facts.spec.digest

    @property
    def digest(self) -> str:
        """Return one digest of the facts about all platforms."""
        return digest([facts.digest for facts in self.places]) if self.places else self.facts.digest

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the platforms that passed, with their prices; empty for a job with one platform."""
        return tuple(
            Choice(platform=f.spec.platform, gpu=f.spec.gpu, price=f.price, worst_cost=f.worst_cost)
            for f in self.places
        )

    @property
    def price(self) -> float | None:
        """Return the highest price per hour; None if one is unknown."""
        return _highest([facts.price for facts in self.places or (self.facts,)])

    @property
    def worst_cost(self) -> float | None:
        """Return the highest of the job's maximum costs on its platforms; None if one is unknown."""
        return _highest([facts.worst_cost for facts in self.places or (self.facts,)])

    def question(self, ctx: Context) -> str:
        """Return the reason why the user must approve the cost on one of the platforms; empty if no approval is
        needed.
        """
        asks = (spending_question(ctx, facts) for facts in self.places or (self.facts,))
        return "; ".join(dict.fromkeys(filter(None, asks)))


def _highest(amounts: list[float | None]) -> float | None:
    return None if None in amounts else max(amount for amount in amounts if amount is not None)


async def submit(
    ctx: Context,
    spec: JobSpec,
    *,
    dry_run: bool = False,
    receipt: str | None = None,
    script_file: str = "",
    rehearse: bool = False,
) -> Submission:
    """Check a job, and launch it if allowed. If `rehearse` is true, first run its script's first step locally.

    On a metered platform, the first call returns a receipt and launches nothing. The second call, with that receipt and
    the same arguments, launches the job. `script_file` is the file in the working directory that contains the script; a
    launch with only the receipt reads it again.

    Raises Refused with the findings, NotFound for an unknown receipt, Conflict for a stale receipt or a receipt for
    another job, and BadRequest if a receipt is combined with `dry_run` or `rehearse`.
    """
    if receipt is not None and (dry_run or rehearse):
        what = "a dry run launches nothing" if dry_run else "a rehearsal must run before the receipt is issued"
        raise BadRequest(f"{what}, but a receipt launches the job; the call had no effect", "Omit one of them.")
    spec = spec if spec.alternatives else settled(ctx, spec)
    if receipt is not None:
        return await _redeem(ctx, spec, receipt)
    tried = await rehearse_script(ctx, spec) if rehearse else None
    checks = Checks.DRY_RUN if dry_run else Checks.RECEIPT
    checked = await (_check_list if spec.alternatives else check_spec)(ctx, spec, checks=checks)
    live = _live_duplicate(ctx, checked)
    if live is not None and not dry_run:
        job = await advance(ctx, live)
        found = Submission(checked.findings, checked.quote, checked.worst_cost, adopted=True, rehearsal=tried)
        return _submitted(ctx, job, found)
    facts, ticket = checked.facts, f"r{random.token_hex(8)}"
    waits = dry_run or facts.metered  # the receipt may be used for a launch later
    expires = ctx.clock.now() + ctx.policy.receipt_ttl_s
    ask = checked.question(ctx)
    issued = ReceiptIssued(
        spec_digest=checked.spec_digest,
        facts_digest=checked.digest,
        price=checked.price,
        expires_at=expires,
        worst_cost=checked.worst_cost,
        name=facts.spec.name,
        platform=facts.spec.platform,
        timeout_s=facts.spec.timeout_s,
        ask=ask,
        hub=facts.hub.watched if facts.hub else {},
        parts=facts.parts,
        inputs={file.path: file.sha256 for file in facts.inputs},
        artifact_store=facts.spec.artifact_store,
        storage=storage_after(ctx, *(f.spec for f in checked.places or (facts,))) if facts.metered else (),
        storage_usd_per_hour=checked.quote.storage_usd_per_hour if checked.quote else None,
        choices=checked.choices,
        spec=(spec if spec.alternatives else facts.spec) if waits else None,
        script_file=script_file if waits else "",
    )
    ctx.ledger.add(f"receipt/{ticket}", issued)
    if waits:
        order = order_for(ctx, ticket) if facts.metered else None
        verb = order.verb if order else None
        cost, choices = checked.worst_cost, checked.choices
        done = Submission(checked.findings, checked.quote, cost, ticket, expires, ask, verb, choices=choices)
        return replace(done, rehearsal=tried, storage=issued.storage)
    return replace(await _accept(ctx, checked, ticket), rehearsal=tried)


def storage_after(ctx: Context, *specs: JobSpec) -> tuple[str, ...]:
    """Return the names of the storage that is still billed after the machines of these jobs are terminated."""
    each = (ctx.profile(spec.platform).residue("terminate", requested=spec.durable_storage) for spec in specs)
    return tuple(dict.fromkeys(name for names in each for name in names))


def settled(ctx: Context, spec: JobSpec) -> JobSpec:
    """Return the spec as its platform will run it, with options resolved.

    Raises BadRequest for options that the platform does not support.
    """
    try:
        backend = ctx.backend(ctx.profile(spec.platform).backend)
    except (NotFound, NotSupported):
        return spec  # a rule reports this together with all other findings
    if isinstance(backend, Optioned):
        found = backend.settle(spec)
        return found if found.platform == spec.platform else settled(ctx, found)
    if spec.options and ctx.profile(spec.platform).provider is not None:
        check_machine_options(spec, ctx.provider(spec.platform))
    elif spec.options:
        raise BadRequest(
            f"{spec.platform} has no options, but {', '.join(sorted(spec.options))[:100]} was given",
            do(Action.LEAVE_OUT_ARGUMENT, name="options"),
        )
    return spec


def check_machine_options(spec: JobSpec, provider: Provider) -> None:
    """Raise BadRequest if an option for rented machines is not supported, or if its value is not a short name."""
    taken = provider.machine_options if isinstance(provider, MachineOptionsProvider) else frozenset()
    for name, wish in spec.options.items():
        if name not in taken:
            has = f"supports only the options {', '.join(sorted(taken))}" if taken else "has no options"
            raise BadRequest(
                f"{spec.platform} {has}, but {line(name, 60)} was given", do(Action.LEAVE_OUT_ARGUMENT, name="options")
            )
        if not isinstance(wish, str) or not re.fullmatch(r"[A-Za-z0-9][\w./:@-]{0,299}", wish):
            raise BadRequest(f"the {name} {line(wish, 60)!r} is not a valid name", f"Pass a single {name} as text.")


async def check_spec(
    ctx: Context, spec: JobSpec, *, tasks: int = 1, checks: Checks = Checks.LAUNCH
) -> CheckedSubmission:
    """Gather the facts and run the rules on them. Blocking findings are recorded and raised as Refused.

    `tasks` is the number of jobs like this one that are submitted to the engine as one array.
    """
    checked = await _check_platform(ctx, spec, tasks=tasks, checks=checks)
    if any(finding.blocks for finding in checked.findings):
        raise _refusal(ctx, spec, checked.findings)
    return checked


async def _check_platform(
    ctx: Context, spec: JobSpec, *, checks: Checks, tasks: int = 1, elsewhere: SubmitFacts | None = None
) -> CheckedSubmission:
    """Return the facts and findings for a job on one platform, including blocking findings."""
    lacking = await _local_finding(ctx, spec, checks)
    facts = await gather(ctx, spec, tasks=tasks, elsewhere=elsewhere)
    quote = None if facts.quote is None or isinstance(facts.quote, Unknown) else facts.quote.value
    return CheckedSubmission(facts, (*run_rules(rules_of("submit"), facts), *lacking), quote)


async def _local_finding(ctx: Context, spec: JobSpec, checks: Checks) -> tuple[Finding, ...]:
    """Return a finding if the local machine can't run the job. For a rehearsed platform, it is only a warning.

    In a dry run, the problem is always returned. Otherwise, NoSandbox is raised, and BadRequest if the call may launch
    the job.
    """
    try:
        profile = ctx.profile(spec.platform)
        backend = ctx.backend(profile.backend)
    except (NotFound, NotSupported):
        return ()  # a rule reports this together with all other findings
    rehearsed = profile.provider is not None
    try:
        if isinstance(backend, SandboxBackend):
            await backend.admit(spec, rehearsed=rehearsed)
    except (NoSandbox, BadRequest) as error:
        waits = checks is Checks.RECEIPT and rehearsed and not isinstance(error, NoSandbox)
        if checks is not Checks.DRY_RUN and not waits:
            raise
        found = Finding.of(error, rule="PF-PLACE-001")
        return (found.model_copy(update={"severity": Severity.WARNING}) if rehearsed else found,)
    return ()


def _refusal(ctx: Context, spec: JobSpec, findings: tuple[Finding, ...]) -> Refused:
    """Record that the gate refused a job, and return the error."""
    rules = tuple(dict.fromkeys(f.rule for f in findings if f.blocks))
    # The spec may contain a secret, so only its digest and redacted names are recorded.
    names = scrubbed({"name": spec.name, "platform": spec.platform}, secret_values(ctx.env))
    refused = JobRefused(**names, spec_digest=spec.digest, rules=tuple(sorted(rules)))
    ctx.ledger.add(f"job/x{random.token_hex(5)}", refused)
    return Refused(
        f"the submit gate refused {spec.name!r} ({', '.join(rules)}); nothing was launched or billed",
        ("Apply the fixes given in the findings.", do(Action.RETRY)),
        findings,
    )


async def _check_list(ctx: Context, spec: JobSpec, *, checks: Checks = Checks.LAUNCH) -> CheckedSubmission:
    """Check a job on each of its platforms, and keep those that pass, in order.

    A platform with blocking findings is removed from the list. Raises Refused if no platform remains, and BadRequest
    for a platform that is not rented or whose spec for the job differs from that of the first platform.
    """
    places = tuple(settled(ctx, choice) for choice in spec.choices)
    for place in places:
        with contextlib.suppress(NotFound):  # a rule reports this together with all other findings
            if not ctx.profile(place.platform).meter.metered:
                raise BadRequest(
                    f"{place.platform} is not rented, so it needs no alternatives", "Remove it from the alternatives."
                )
        if place.at(places[0].platform, places[0].gpu) != places[0]:
            raise BadRequest(
                f"{place.platform} and {places[0].platform} use different paths for this job's outputs",
                do(Action.LEAVE_OUT_ARGUMENT, name="alternatives"),
            )
    seen = [await _check_platform(ctx, places[0], checks=checks)]
    seen += [await _check_platform(ctx, place, checks=checks, elsewhere=seen[0].facts) for place in places[1:]]
    passed = [checked for checked in seen if not any(finding.blocks for finding in checked.findings)]
    if not passed or any(checked.facts.leaks for checked in seen):  # a leaked secret blocks all platforms
        raise _refusal(ctx, spec, _once(finding for checked in seen for finding in checked.findings))
    findings = [finding for checked in passed for finding in checked.findings]
    for checked in seen:
        where = f"{checked.facts.spec.platform} {checked.facts.spec.gpu or ''}".strip()
        for finding in filter(lambda f: f.blocks, checked.findings):
            text = f"{where} was removed from the list: {finding.message}"
            findings.append(finding.model_copy(update={"severity": Severity.WARNING, "message": text}))
    facts = tuple(checked.facts for checked in passed)
    return CheckedSubmission(facts[0], _once(findings), passed[0].quote, spec.digest, facts)


def _once(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Remove repeated findings, because several platforms report the same findings about a script."""
    return tuple({(finding.rule, finding.message): finding for finding in findings}.values())


async def _redeem(ctx: Context, spec: JobSpec, receipt: str) -> Submission:
    """Launch a receipt's job if the facts have not changed since the check. A repeated call returns the same job."""
    issued = read_receipt(ctx.ledger, receipt).issued
    if issued.spec_digest != spec.digest:
        raise Conflict("the receipt was issued for other arguments", ANOTHER_RECEIPT)
    used = ctx.ledger.used(JobAccepted, receipt)
    if used is not None:  # a repeated call, perhaps after a lost reply
        job = await advance(ctx, used.subject.removeprefix("job/"))
        return _submitted(ctx, job, Submission((), worst_cost_usd=job.worst_cost, receipt=receipt, adopted=True))
    if ctx.clock.now() > issued.expires_at:
        raise Conflict("the receipt has expired, and the facts may have changed", ANOTHER_RECEIPT)
    checked = await _check_list(ctx, spec) if spec.alternatives else await check_spec(ctx, spec)
    if checked.digest != issued.facts_digest:
        change = _change(issued, checked)
        raise Conflict(f"the checked facts have changed since the receipt was issued: {change}", ANOTHER_RECEIPT)
    return await _accept(ctx, checked, receipt)


class NeedsApproval(Refused):
    """The spending exceeds the amount that the policy allows without approval."""

    code = "approval_required"

    def __init__(self, message: str, ticket: str) -> None:
        super().__init__(message, (approval(ticket), do(Action.SUBMIT, receipt=ticket)))
        self.ticket = ticket


def _change(issued: ReceiptIssued, checked: CheckedSubmission) -> str:
    """Return a description of the first difference between the current facts and those that a receipt is bound to."""
    if issued.choices != checked.choices:
        was, here = (
            ", ".join(f"{' '.join(filter(None, (c.platform, c.gpu)))} at {usd_per_hour(c.price)}" for c in each)
            for each in (issued.choices, checked.choices)
        )
        return f"the list of platforms was {was} and is now {here}"
    before, now = issued.price, checked.price
    if before != now:
        return f"the price was {usd_per_hour(before)} and is now {usd_per_hour(now)}"
    then, seen = issued.hub, checked.facts.hub.watched if checked.facts.hub else {}
    missing = next(
        (f"{name} was {then.get(name)} and is now {seen.get(name)}" for name in then.keys() ^ seen.keys()), ""
    )
    parts = (_PARTS[name] for name, seen in checked.facts.parts.items() if issued.parts.get(name) != seen)
    return moved(issued, checked) or missing or next(parts, "the set of secrets with values has changed")


_PARTS: Final = {
    "policy": "the policy has changed",
    "profile": "the platform's profile has changed",
    "script": "the script at its URL has changed",
}


def moved(issued: ReceiptIssued, checked: CheckedSubmission) -> str:
    """Return a description of the input files, or else of the Hub repos, that have changed since a receipt was issued.

    Return an empty string if none has changed. Repos that appear in only one of the two sets of facts are ignored.
    """
    listed, files = issued.inputs, {file.path: file.sha256 for file in checked.facts.inputs}
    if changed := sorted(path for path in {**listed, **files} if listed.get(path) != files.get(path)):
        return f"input files have changed since the check: {line(', '.join(changed))}"
    then, seen = issued.hub, checked.facts.hub.watched if checked.facts.hub else {}
    both = (name for name in then if name in seen)
    return "; ".join(f"{name} was {then[name]} and is now {seen[name]}" for name in both if then[name] != seen[name])


async def _accept(ctx: Context, checked: CheckedSubmission, receipt: str) -> Submission:
    """Record the job, once per receipt, and perform its first step."""
    job_id = "j" + hashlib.sha256(receipt.encode()).hexdigest()[:10]
    async with ctx.lock(CAPS):  # so that two processes can't accept a duplicate or spend the same budget
        used = ctx.ledger.used(JobAccepted, receipt)
        live = used.subject.removeprefix("job/") if used else _live_duplicate(ctx, checked)
        if live is None:
            ask = checked.question(ctx)
            if ask and not spending_approved(ctx, receipt):
                raise NeedsApproval(f"this spending needs the user's approval: {ask}", receipt)
            if ask:
                check_receipt(ctx, receipt)
            await take_inputs(ctx, checked)
            record_job(ctx, checked, job_id, receipt, token=receipt)
    job = await advance(ctx, live or job_id)
    done = Submission(checked.findings, checked.quote, checked.worst_cost, receipt, choices=checked.choices)
    return _submitted(ctx, job, replace(done, adopted=live is not None))


async def take_inputs(ctx: Context, checked: CheckedSubmission) -> None:
    """Store the checked input files before the job is accepted; delete stored files that no live job needs."""
    inputs = checked.facts.inputs
    kept = [inputs, *(read_job(ctx.ledger, name).inputs for name in _live_jobs(ctx))]
    await to_thread.run_sync(sweep, ctx.input_store, {file for files in kept for file in files})
    if inputs:
        await to_thread.run_sync(stage, ctx.input_store, ctx.cwd or Path.cwd(), inputs)


def record_job(
    ctx: Context,
    checked: CheckedSubmission,
    job_id: str,
    receipt: str,
    *,
    token: str,
    with_it: tuple[str, Body] | None = None,
    since: float | None = None,
) -> None:
    """Record a job and the user's decisions about it from the receipt, in one transaction.

    Raises Conflict for a `token` that has already been used. For a fan-out's job, `with_it` is another event and its
    subject, recorded under the same token, and `since` is the time when the fan-out was accepted. Such a job has no
    relaunch budget, because the fan-out launches more machines itself.
    """
    spec = checked.facts.spec
    accepted = JobAccepted(
        spec=spec,
        spec_digest=checked.spec_digest,
        facts_digest=checked.digest,
        worst_cost=checked.worst_cost,
        price=checked.facts.price,
        receipt=receipt,
        script_digest="" if spec.script is None else digest(spec.script),
        inputs=checked.facts.inputs,
        choices=checked.choices,
    )
    with ctx.ledger.transaction():
        ctx.ledger.add(f"job/{job_id}", accepted, token=token)
        if with_it:
            ctx.ledger.add(*with_it, token=token)
        order = order_for(ctx, receipt, since) if checked.facts.metered else None
        self_stop = self_stop_for(ctx, order) if checked.facts.metered else None
        relaunch = relaunch_for(ctx, receipt) if checked.facts.metered and with_it is None else None
        for decided in filter(None, (order, self_stop, relaunch)):
            ctx.ledger.add(f"job/{job_id}", decided)


def _submitted(ctx: Context, job: JobRecord, found: Submission) -> Submission:
    """Add the job, automatic teardown's verb and the next steps to a result."""
    order, storage = automatic_teardown(ctx, job.id), storage_after(ctx, job.spec) if job.lease else ()
    verb, rest = order.verb if order else None, following(ctx, job)
    return replace(found, job=job, ordered=verb, next_steps=rest, storage=storage)


def _live_jobs(ctx: Context) -> list[str]:
    return job_ids(ctx.ledger, *(s for s in Job if s not in TERMINAL_JOBS))


def _live_duplicate(ctx: Context, checked: CheckedSubmission) -> str | None:
    """Return the open job from an earlier call with exactly the same arguments and inputs, if any."""
    wanted = checked.spec_digest, checked.facts.inputs
    for job_id in _live_jobs(ctx):
        accepted = ctx.ledger.last(f"job/{job_id}", JobAccepted)
        if accepted is not None and (accepted.data.spec_digest, accepted.data.inputs) == wanted:
            return job_id
    return None
