"""Show the effective settings with their origins, and check that this machine meets their requirements."""

from __future__ import annotations

import os
import shutil
from typing import Final

from anyio import to_thread
from pydantic import BaseModel

from gpuwarden.app import open_context
from gpuwarden.config import Config, in_short, load_config
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.guidance import steps
from gpuwarden.core.plural import counted
from gpuwarden.core.policy import WEAK, Policy
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.cli import watch_service
from gpuwarden.interfaces.cli.notes_service import summary
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.http.record import running_server
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.interfaces.results import Result, WarnedReply, warned
from gpuwarden.ledger.audit import audit
from gpuwarden.ledger.chain import BreakCode
from gpuwarden.lifecycle.leases.auto_teardown import notices
from gpuwarden.policy_record import Notice, absolute, usual_homes
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind
from gpuwarden.running_servers import elsewhere, running


class SettingReply(BaseModel):
    """One effective setting with its origin."""

    setting: str
    value: str
    origin: str


class CheckedReply(BaseModel):
    """The result of one check."""

    what: str
    ok: bool
    found: str


class LedgerReply(Result):
    """The result of checking the full ledger. `first_broken` is the number of the first invalid event."""

    path: str
    events: int
    first_broken: int | None = None


class DoctorReply(WarnedReply):
    """All settings and checks."""

    settings: list[SettingReply]
    checks: list[CheckedReply]


async def examine_ledger() -> LedgerReply:
    """Verify the ledger's full hash chain and the tables derived from the events.

    Raises LedgerError if the ledger does not exist.
    """
    ctx = open_context("doctor")
    found = await to_thread.run_sync(audit, ctx.ledger)
    reply = LedgerReply(path=str(ctx.ledger.path), events=ctx.ledger.count())
    doubt = ctx.ledger.trouble()
    if found.broken is not None:
        at = found.broken
        what = f"event {at.seq}" + (f" ({line(at.kind, 60)} of {line(at.subject, 80)})" if at.kind else "")
        reply = reply.model_copy(update={"ok": False, "first_broken": at.seq, "message": f"{what} {_BROKEN[at.code]}."})
    elif doubt is not None and doubt.incomplete:
        reply = reply.model_copy(update={"ok": False, "message": f"{doubt.message[:1].upper()}{doubt.message[1:]}."})
    elif found.differs:
        names = ", ".join(found.differs)
        reply = reply.model_copy(update={"ok": False, "message": f"The table {names} does not match the events."})
    if reply.ok:
        return reply.model_copy(update={"message": f"The chain of {counted(reply.events, 'event')} is intact."})
    return reply.model_copy(update={"code": "ledger_damaged", "next": steps(doubt.hint if doubt else _RESTORE)})


_BROKEN: Final[dict[BreakCode, str]] = {
    "changed": "or an earlier event was changed: the hash does not match",
    "missing": "is missing",
    "undecodable": "contains bytes that are not text",
}
_RESTORE: Final = (
    "The ledger is not reliable. Restore a backup, and check every platform's console, because machines may still be "
    "billed."
)


def _watch(config: Config) -> CheckedReply:
    """Check that a watch is running. Without a watch, automatic teardown does not happen and no alert is sent."""
    found, needed = watch_service.runs(config.home), config.policy.teardown.automatic != "off"
    ok = found.leads or found.installed or not needed
    return CheckedReply(what="watch", ok=ok, found=str(found) + ("" if ok else "; automatic teardown needs a watch"))


async def examine() -> DoctorReply:
    """Check the configuration and its requirements. Raises BadRequest for a policy that can't be read."""
    config = load_config()
    ledger = _ledger(config)  # creates the home folder at first use
    other = [f"{n.text} {in_commands(n.next_steps)}" for n in config.notices if n.kind == "other_policy"]
    there = "" if config.policy_file.exists() else ", which does not exist"
    policy = " ".join(other) or f"{config.policy_file}{there}, {config.digest[:19]}"
    existing = next(p for p in (config.home, *config.home.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    others = other_servers(config)
    here = counted(len(running()) - len(others), "server")
    checks = [
        ledger,
        CheckedReply(what="policy", ok=not other, found=policy),
        CheckedReply(what="disk", ok=free > 100 << 20, found=f"{free / 2**30:.1f} GiB free at {existing}"),
        _notes(),
        await to_thread.run_sync(_sandbox, config.policy),
        await to_thread.run_sync(_watch, config),
        _server(config),
        CheckedReply(what="servers", ok=not others, found=" ".join([f"{here} on this ledger.", *others])),
    ]
    for name, why in PROGRAMS:
        path = shutil.which(name)
        checks.append(CheckedReply(what=name, ok=path is not None, found=path or f"not installed; it {why}"))
    bad = [c.what for c in checks if not c.ok and c.what in {"ledger", "disk", "notes"}]
    plugins = plugin_rows()
    checks += plugins
    bad += [c.what for c in plugins if not c.ok]
    reply = DoctorReply(
        ok=not bad,
        code="ok" if not bad else "failed",
        message="" if not bad else f"Not usable: {', '.join(bad)}.",
        hint="Fix the failed checks." if bad else "" if config.policy_file.exists() else NO_POLICY,
        settings=setting_rows(config),
        checks=checks,
    )
    try:
        found = notices(open_context("doctor"))
    except WardenError:  # the ledger check reports this error
        found = config.notices
    return warned(reply, found, in_commands)


def setting_rows(config: Config) -> list[SettingReply]:
    """Return every effective setting with its origin."""
    places = [
        SettingReply(
            setting="home",
            value=str(config.home),
            origin="GPUWARDEN_HOME" if "GPUWARDEN_HOME" in os.environ else "default",
        ),
        SettingReply(
            setting="policy", value=str(config.policy_file), origin="file" if config.policy_file.exists() else "absent"
        ),
    ]
    values = [
        SettingReply(setting=s.path, value=in_short_unless_secret(s.path, s.value), origin=s.origin)
        for s in config.settings
    ]
    return places + values


NO_POLICY = "No policy file exists, so all spending needs approval. docs/policy.md shows an example."
PROGRAMS = (
    ("uv", "starts the plugins for Claude Code, Codex and Gemini, and runs scripts whose packages are not installed"),
    ("ssh", "connects to real machines"),
)


def in_short_unless_secret(path: str, value: object) -> str:
    """Format a policy value. The PIN's hash and a webhook's URL are shown only as set or not set.

    Weak approval channels are marked.
    """
    if path.endswith(("pin_hash", "_url")):  # a webhook's URL is a secret
        return "set" if value else "not set"
    if isinstance(value, tuple):
        value = tuple(f"{name} (weak: a script can answer it)" if name in WEAK else name for name in value)
    return in_short(value)


def _ledger(config: Config) -> CheckedReply:
    try:
        ctx = open_context("doctor")
        doubt = ctx.ledger.trouble()
        if doubt is not None:
            return CheckedReply(what="ledger", ok=False, found=f"{doubt.message}. {doubt.hint}")
    except WardenError as error:
        return CheckedReply(what="ledger", ok=False, found=f"{error.message} {in_commands(error.next_steps)}")
    usual = usual_homes()
    other = "" if absolute(config.home) in usual else f"; the default ledger is in {usual[0]}"
    return CheckedReply(what="ledger", ok=True, found=f"{ctx.ledger.path}, {ctx.ledger.count()} events{other}")


def _notes() -> CheckedReply:
    try:
        ok, found = summary(open_context("doctor"))
        return CheckedReply(what="notes", ok=ok, found=found)
    except WardenError as error:
        return CheckedReply(what="notes", ok=False, found=f"{error.message} {in_commands(error.next_steps)}")


def _server(config: Config) -> CheckedReply:
    """Report the address of this ledger's HTTP server and the number of its tokens."""
    try:
        where = f"at {running_server(config.home).url}"
    except NotFound:
        where = "not running"
    try:
        tokens = counted(len(TokenStore(config.home, SystemClock()).listed()), "token")
        return CheckedReply(what="server", ok=True, found=f"{where}; {tokens}")
    except WardenError as error:
        return CheckedReply(what="server", ok=False, found=f"{error.message}. {in_commands(error.next_steps)}")


def other_servers(config: Config) -> list[str]:
    """Return one sentence for each running server that uses a different ledger or policy file than this shell."""
    found = elsewhere(absolute(config.home), config.policy_file)
    return [Notice("other_server", s.title, s.home, about=s.policy).text for s in found]


def _sandbox(policy: Policy) -> CheckedReply:
    """Report the sandbox that isolates local jobs, and its gaps."""
    found = detect()
    if found.kind is Kind.NONE:
        then = "jobs run without one, as the policy allows" if policy.local.unsandboxed else "jobs can't run here"
        return CheckedReply(what="sandbox", ok=False, found=f"none works ({found.why}); {then}")
    opened = [OPEN[found.kind]] if found.kind in OPEN else []
    opened += ["the policy gives jobs network access"] if policy.local.network else []
    notes = f"; {'; '.join(opened)}" if opened else ""
    return CheckedReply(what="sandbox", ok=True, found=f"{found.kind} {found.program}".rstrip() + notes)


OPEN = {
    Kind.LANDLOCK: "it does not block UDP or Unix sockets with a path",
    Kind.SANDBOX_EXEC: "gpuwarden's tests do not cover it",
}


def plugin_rows() -> list[CheckedReply]:
    """Load every plug-in.

    Return a row with counts, and a row for each plug-in that is broken or comes from another package.
    """
    from gpuwarden.backends.base import BACKENDS
    from gpuwarden.checkpoints.plugins import FORMATS, LAYOUTS
    from gpuwarden.providers.base import PROVIDERS
    from gpuwarden.rules.catalog import RULES

    everything = {r.what: r.statuses() for r in (PROVIDERS, BACKENDS, FORMATS, LAYOUTS, RULES)}
    sound = [counted(sum(not s.fault for s in found), what) for what, found in everything.items()]
    rows = [CheckedReply(what="plug-ins", ok=True, found=", ".join(sound))]
    for status in (s for found in everything.values() for s in found if s.fault or s.origin):
        found = f"{status.fault} {status.hint}" if status.fault else f"from the package {status.origin}"
        rows.append(CheckedReply(what=f"{status.what} {status.name}", ok=not status.fault, found=line(found, 1000)))
    return rows
