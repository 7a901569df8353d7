"""The submit gate: facts are gathered, rules read them, a receipt is bound to both, and only then is a job accepted."""

from __future__ import annotations

import hashlib
import secrets as random
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotFound, NotSupported, Refused, WardenError
from gpuwarden.core.fence import SECRET_NAME, TOKEN, scrubbed, secret_values
from gpuwarden.core.hubfacts import HubFacts
from gpuwarden.core.models import Answer, JobSpec, Known, Quote, Unknown
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.core.script import ScriptFacts, read_command, read_script
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job
from gpuwarden.core.tasks import first_error
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.gather import hub_facts
from gpuwarden.hub.scripts import fetch_script
from gpuwarden.ledger.store import Event
from gpuwarden.lifecycle.advance import advance, wanted
from gpuwarden.lifecycle.meter import lease_now, spent
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, job_ids, lease_ids, read_job
from gpuwarden.lifecycle.warden import REHEARSAL, Warden
from gpuwarden.providers.base import account_keys
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import Leak, SubmitFacts

DAY_S = 86_400
OWN_VARIABLES = "GPUWARDEN_"


@dataclass(frozen=True)
class Submission:
    """What became of a submit. `job` is None while nothing was accepted: then `receipt` is what to come back with.

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


@dataclass(frozen=True)
class _Checked:
    facts: SubmitFacts
    findings: tuple[Finding, ...]
    quote: Quote | None = field(default=None)


async def submit(w: Warden, spec: JobSpec, *, dry_run: bool = False, receipt: str | None = None) -> Submission:
    """Check a job, and launch it when that is allowed.

    On a metered platform the first call returns a receipt and launches nothing; the second call, with that receipt
    and the same arguments, launches. Raises Refused with the findings, NotFound or Conflict for a receipt that is
    not ours, stale or for something else, BadRequest for a dry run that brings one.
    """
    if receipt is not None and dry_run:
        raise BadRequest("dry_run only checks, and a receipt launches; nothing was done", "Leave one of them out.")
    if receipt is not None:
        return await _redeem(w, spec, receipt)
    checked = await _check(w, spec)
    live = _live_twin(w, spec)
    if live is not None and not dry_run:
        return Submission(
            checked.findings, checked.quote, checked.facts.worst_cost, job=await advance(w, live), adopted=True
        )
    issued = _issue(w, checked)
    if dry_run or checked.facts.metered:
        return issued
    assert issued.receipt is not None
    return await _accept(w, checked, issued.receipt)


async def _check(w: Warden, spec: JobSpec) -> _Checked:
    facts = await gather(w, spec)
    findings = tuple(run_rules(rules_of("submit"), facts))
    if any(f.blocks for f in findings):
        _note_refusal(w, spec, findings)
        blocking = [f for f in findings if f.blocks]
        rules = ", ".join(dict.fromkeys(f.rule for f in blocking))
        raise Refused(
            f"the submit gate refused {spec.name!r} ({rules}); nothing was launched or billed",
            "Mend each finding as it says, then submit again.",
            findings,
        )
    quote = None if facts.quote is None or isinstance(facts.quote, Unknown) else facts.quote.value
    return _Checked(facts, findings, quote)


def _note_refusal(w: Warden, spec: JobSpec, findings: tuple[Finding, ...]) -> None:
    # The spec may hold a secret, so only its digest is kept, and of its names what is none.
    body = {
        "name": spec.name,
        "platform": spec.platform,
        "spec_digest": spec.digest,
        "rules": sorted({f.rule for f in findings if f.blocks}),
    }
    body = scrubbed(body, secret_values(w.env))
    w.ledger.add(f"job/x{random.token_hex(5)}", "job.refused", body, state=Job.REFUSED)


# ------------------------------------------------------------------------------------------------------- facts


async def gather(w: Warden, spec: JobSpec) -> SubmitFacts:
    """Everything the submit rules read."""
    try:
        profile: Profile | None = w.profile(spec.platform)
    except NotFound:
        profile = None
    config = HubConfig.from_env(w.env)
    script, script_url = await _script(spec, config)
    quote: Answer[Quote] | None = None
    unsold = ""
    hub: HubFacts | None = None

    async def ask_price() -> None:
        nonlocal quote, unsold
        if profile is not None and profile.meter.metered:
            quote, unsold = await _quote(w, spec)

    async def ask_hub() -> None:
        nonlocal hub
        hub = await hub_facts(script, spec, config, clock=w.clock)

    with first_error():
        async with anyio.create_task_group() as group:
            group.start_soon(ask_price)
            group.start_soon(ask_hub)
    return SubmitFacts(
        spec=spec,
        policy=w.policy,
        profile=profile,
        platforms=tuple(w.platforms()),
        script=script,
        quote=quote,
        unusable=_unusable(w, profile, spec.platform),
        leaks=tuple(find_leaks(spec, w)),
        unset_secrets=tuple(name for name in spec.secrets if not w.env.get(name)),
        account_secrets=_account_secrets(w, spec),
        unsold=unsold,
        hub=hub,
        script_url=script_url,
        proven_script=spec.script is not None and _has_succeeded(w, spec.script),
        looked=await _look(w, profile, spec.platform),
    )


async def _script(spec: JobSpec, config: HubConfig) -> tuple[ScriptFacts, Answer[str]]:
    """What the script says, its text given or behind an address; for other commands, what their flags say."""
    if spec.script is not None:
        # A megabyte takes seconds of processor time; other calls go on meanwhile.
        return await anyio.to_thread.run_sync(read_script, spec.script, spec.env, spec.args), Known("")
    fetched = await fetch_script(spec.command, config)
    if isinstance(fetched, Known) and fetched.value.text:
        return read_script(fetched.value.text, spec.env, spec.command), Known("")
    trouble = fetched if isinstance(fetched, Unknown) else Known(fetched.value.trouble if fetched else "")
    return read_command(spec.command, spec.env), trouble


def _has_succeeded(w: Warden, script: str) -> bool:
    """Whether a job with this very script has succeeded, with whatever arguments."""
    return any(read_job(w.ledger, i).spec.script == script for i in job_ids(w.ledger, Job.SUCCEEDED))


async def _look(w: Warden, profile: Profile | None, platform: str) -> tuple[Finding, ...]:
    """What the backend says of a place that is there already, or the provider of the account that would rent one."""
    if profile is None or _unusable(w, profile, platform):
        return ()
    known = {r.id for r in rules_of("submit")}
    look, fallback = (
        (w.provider(platform).check(), "PF-ACCT-001")
        if profile.meter.metered
        else (w.backend(profile.backend).check(w.owned_place(platform)), "PF-PLACE-001")
    )
    try:
        found = await look
    except WardenError as error:
        return (Finding(rule=fallback, severity=Severity.UNKNOWN, message=error.message, fix=error.hint),)
    return tuple(f if f.rule in known else f.model_copy(update={"rule": fallback}) for f in found)


def _unusable(w: Warden, profile: Profile | None, platform: str) -> str:
    """Why jobs can't be run on a platform by this build; empty when they can."""
    if profile is None:
        return ""
    try:
        w.backend(profile.backend)
        if profile.meter.metered:
            w.provider(platform)
    except (NotFound, NotSupported) as error:
        return f"{error.message}. {error.hint}".strip()
    return ""


async def _quote(w: Warden, spec: JobSpec) -> tuple[Answer[Quote], str]:
    """The price now, and why the platform does not rent what is asked; empty when it does, or nobody knows."""
    try:
        answer = await w.provider(spec.platform).quote(wanted(spec))
    except (BadRequest, NotSupported, NoCapacity) as refusal:
        unusable = _unusable(w, w.profile(spec.platform), spec.platform)
        return Unknown(refusal.message), "" if unusable else f"{refusal.message}. {refusal.hint}".strip()
    except WardenError as error:
        return Unknown(error.message), ""
    price = answer.value.price_usd_per_hour if isinstance(answer, Known) else None
    if price is not None and price <= 0:
        return Unknown(f"{spec.platform} quotes {price:g} USD an hour, and nobody rents a machine for nothing"), ""
    return answer, ""


def _account_secrets(w: Warden, spec: JobSpec) -> tuple[str, ...]:
    """The named secrets that no job may have: keys of accounts under any name, and what is gpuwarden's own."""
    keys = account_keys()
    values = {w.env[name] for name in keys if w.env.get(name)}
    return tuple(
        name
        for name in spec.secrets
        if name.upper() in keys or name.upper().startswith(OWN_VARIABLES) or w.env.get(name) in values
    )


def find_leaks(spec: JobSpec, w: Warden) -> list[Leak]:
    """Where a spec holds a secret: by the shape of a token, by name, or by being the value of one of ours."""
    ours = {name: value for name, value in w.env.items() if len(value) >= 8 and SECRET_NAME.search(name)}
    texts = [(f"command[{n}]", word) for n, word in enumerate(spec.command)]
    texts += [(f"args[{n}]", word) for n, word in enumerate(spec.args)]
    texts += [(f"env.{name}", value) for name, value in spec.env.items()]
    texts += [("the script", spec.script or ""), ("name", spec.name), ("gpu", spec.gpu or "")]
    texts += [("platform", spec.platform), *(("a name in env or secrets", name) for name in (*spec.env, *spec.secrets))]
    texts += [(f"outputs[{n}]", path) for n, path in enumerate(spec.outputs)]
    leaks = []
    for where, text in texts:
        known = next((name for name, value in ours.items() if value in text), None)
        if known:
            leaks.append(Leak(where, f"the value of {known}"))
        elif TOKEN.search(text):
            leaks.append(Leak(where, "a token or a private key"))
        elif where.startswith("env.") and SECRET_NAME.search(where[4:]) and len(text) >= 8:
            leaks.append(Leak(where, "a secret, by its name"))
    return leaks


# ---------------------------------------------------------------------------------------------------- receipts


def _issue(w: Warden, checked: _Checked) -> Submission:
    receipt = f"r{random.token_hex(8)}"
    expires = w.clock.now() + w.policy.receipt_ttl_s
    ask = spending_question(w, checked.facts)
    body = {
        "spec_digest": checked.facts.spec.digest,
        "facts_digest": checked.facts.digest,
        "price": checked.facts.price,
        "expires_at": expires,
        "worst_cost": checked.facts.worst_cost,
        "name": checked.facts.spec.name,
        "platform": checked.facts.spec.platform,
        "timeout_s": checked.facts.spec.timeout_s,
        "ask": ask,
        "hub": checked.facts.hub.watched if checked.facts.hub else {},
    }
    w.ledger.add(f"receipt/{receipt}", "receipt.issued", body)
    return Submission(checked.findings, checked.quote, checked.facts.worst_cost, receipt, expires, ask)


async def _redeem(w: Warden, spec: JobSpec, receipt: str) -> Submission:
    issued = w.ledger.last(f"receipt/{receipt}", "receipt.issued")
    if issued is None:
        raise NotFound(f"there is no receipt {receipt!r} in this ledger", "Submit without a receipt to get one.")
    if issued.body["spec_digest"] != spec.digest:
        raise Conflict("the receipt is for other arguments", "Submit these without a receipt to have them checked.")
    used = w.ledger.used("job.accepted", receipt)
    if used is not None:  # a repeated call, perhaps after a lost reply
        job = await advance(w, used.subject.removeprefix("job/"))
        return Submission((), worst_cost_usd=job.worst_cost, receipt=receipt, job=job, adopted=True)
    if w.clock.now() > issued.body["expires_at"]:
        raise Conflict(
            "the receipt has expired: facts may have changed since", "Submit without a receipt for a fresh one."
        )
    checked = await _check(w, spec)
    if checked.facts.digest != issued.body["facts_digest"]:
        raise Conflict(
            f"what was checked has changed since the receipt: {_change(issued, checked)}", "Submit without a receipt."
        )
    return await _accept(w, checked, receipt)


class NeedsApproval(Refused):
    """The spending is above what the user allowed without a question."""

    code = "approval_required"

    def __init__(self, message: str, ticket: str) -> None:
        super().__init__(
            message, f"Ask the user to run: gpuwarden approve {ticket}. Then submit again with this receipt."
        )
        self.ticket = ticket


def _change(issued: Event, checked: _Checked) -> str:
    before, now = issued.body["price"], checked.facts.price
    if before != now:
        return f"the price was {before} USD/h and is {now} USD/h"
    then, seen = issued.body.get("hub", {}), checked.facts.hub.watched if checked.facts.hub else {}
    moved = [
        f"{name} was {then.get(name)} and is {seen.get(name)}"
        for name in {**then, **seen}
        if then.get(name) != seen.get(name)
    ]
    return "; ".join(moved) or "the platform's profile or the secrets that have values"


async def _accept(w: Warden, checked: _Checked, receipt: str) -> Submission:
    """Write the job down, once per receipt, and start it on its way."""
    spec = checked.facts.spec
    job_id = "j" + hashlib.sha256(receipt.encode()).hexdigest()[:10]
    body = {
        "spec": spec.model_dump(mode="json"),
        "spec_digest": spec.digest,
        "facts_digest": checked.facts.digest,
        "worst_cost": checked.facts.worst_cost,
        "price": checked.facts.price,
        "receipt": receipt,
    }
    async with w.lock("submit"):  # so that two processes don't both find no twin, or the same room below a cap
        used = w.ledger.used("job.accepted", receipt)
        live = used.subject.removeprefix("job/") if used else _live_twin(w, spec)
        if live is None:
            _check_spending(w, checked.facts, receipt)
            w.ledger.add(f"job/{job_id}", "job.accepted", body, state=Job.ACCEPTED, token=receipt)
    job = await advance(w, live or job_id)
    return Submission(
        checked.findings, checked.quote, checked.facts.worst_cost, receipt, job=job, adopted=live is not None
    )


def _check_spending(w: Warden, facts: SubmitFacts, receipt: str) -> None:
    ask = spending_question(w, facts)
    if ask and not spending_approved(w, receipt):
        raise NeedsApproval(f"a person has to approve this spending first: {ask}", receipt)


def _live_twin(w: Warden, spec: JobSpec) -> str | None:
    """A job with exactly these arguments that has not ended: the same call, made twice."""
    digest = spec.digest
    for job_id in job_ids(w.ledger, *(s for s in Job if s not in TERMINAL_JOBS)):
        accepted = w.ledger.last(f"job/{job_id}", "job.accepted")
        if accepted is not None and accepted.body["spec_digest"] == digest:
            return job_id
    return None


# ---------------------------------------------------------------------------------------------------- spending


def spending_question(w: Warden, facts: SubmitFacts) -> str:
    """Why a person has to be asked about this cost; empty when it is inside the user's caps."""
    if not facts.metered:
        return ""
    caps, worst = w.policy.caps_for(facts.spec.platform), facts.worst_cost
    if worst is None:
        return "its price is unknown"
    today = spent_today(w, pretend=facts.spec.platform.startswith(REHEARSAL))
    for name, total, cap in (
        ("per_job_usd", worst, caps.per_job_usd),
        ("per_instance_usd", worst, caps.per_instance_usd),
        ("per_day_usd", today + worst, caps.per_day_usd),
    ):
        if total > cap:
            return f"it may come to {total:.2f} USD, above the cap {name} = {cap:.2f}"
    return ""


def spent_today(w: Warden, *, pretend: bool) -> float:
    """What the last day's jobs cost or may still cost, and what older machines billed in it. Pretend money apart."""
    day, leases = w.clock.now() - DAY_S, [lease_now(w, name) for name in lease_ids(w.ledger)]
    total = 0.0
    for job in (read_job(w.ledger, job_id) for job_id in job_ids(w.ledger)):
        mine = [lease for lease in leases if lease.job_id == job.id]
        if job.spec.platform.startswith(REHEARSAL) is not pretend:
            continue
        if job.accepted_at > day:
            total += _committed(w, job, mine)
        else:
            total += sum(_billed(w, lease, day) for lease in mine)
    return total


def _committed(w: Warden, job: JobRecord, leases: list[LeaseRecord]) -> float:
    cost = sum(max(spent(w, lease.id) or 0.0, _billed(w, lease, lease.opened_at)) for lease in leases)
    open_ended = job.state not in TERMINAL_JOBS or any(lease.state in LIVE_LEASES for lease in leases)
    expected = job.spec.max_cost_usd if job.worst_cost is None else job.worst_cost
    return max(expected or 0.0, cost) if open_ended else cost


def _billed(w: Warden, lease: LeaseRecord, since: float) -> float:
    """What a machine that may be billing has cost since then, by its price: it bills on after its job has ended."""
    price = lease.instance.price_usd_per_hour if lease.instance else None
    if lease.state not in LIVE_LEASES or price is None:
        return 0.0
    return price * (w.clock.now() - max(since, lease.opened_at)) / 3600


def spending_approved(w: Warden, receipt: str) -> bool:
    """Whether a person approved this receipt's spending, and the approval has not expired."""
    granted = w.ledger.last(f"receipt/{receipt}", "approval.granted")
    return granted is not None and bool(w.clock.now() <= granted.body["expires_at"])
