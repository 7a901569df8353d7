"""Show the settings in force with their origins, and check what they need on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import BaseModel

from gpuwarden.app import open_context
from gpuwarden.config import Config, in_short, load_config
from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.cli.base import warned
from gpuwarden.interfaces.cli.notes_service import summary
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import WarnedReply
from gpuwarden.policy_record import absolute, usual_homes


class SettingReply(BaseModel):
    """One effective setting."""

    setting: str
    value: str
    origin: str


class CheckedReply(BaseModel):
    """One check."""

    what: str
    ok: bool
    found: str


class DoctorReply(WarnedReply):
    """All settings and checks."""

    settings: list[SettingReply]
    checks: list[CheckedReply]


async def examine() -> DoctorReply:
    """Check the configuration and what it needs. Raises BadRequest for a policy that can't be read."""
    config = load_config()
    checks = [_ledger(config), _policy(config), _disk(config.home), _notes()]
    checks += [_program(name, why) for name, why in PROGRAMS]
    bad = [c.what for c in checks if not c.ok and c.what in {"ledger", "disk", "notes"}]
    reply = DoctorReply(
        ok=not bad,
        code="ok" if not bad else "failed",
        message="" if not bad else f"Not usable: {', '.join(bad)}.",
        hint="Do what the check says." if bad else "" if config.policy_file.exists() else NO_POLICY,
        settings=setting_rows(config),
        checks=checks,
    )
    return warned(reply, config.notices)


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


NO_POLICY = "There is no policy file, so every spending is a question. `Your policy` in the README shows one."
PROGRAMS = (("uv", "runs scripts whose packages are not here"), ("ssh", "reaches real machines"))


def in_short_unless_secret(path: str, value: object) -> str:
    """Show a value of the policy; of the PIN's hash and of a webhook's address only whether there is one."""
    if path.endswith(("pin_hash", "_url")):  # the address of a webhook is as good as its key
        return "set" if value else "not set"
    return in_short(value)


def _ledger(config: Config) -> CheckedReply:
    try:
        ctx = open_context("doctor")
    except WardenError as error:
        return CheckedReply(what="ledger", ok=False, found=f"{error.message} {in_commands(error.next_steps)}")
    usual = usual_homes()
    other = "" if absolute(config.home) in usual else f"; not the usual one, which is in {usual[0]}"
    return CheckedReply(what="ledger", ok=True, found=f"{ctx.ledger.path}, {ctx.ledger.count()} events{other}")


def _policy(config: Config) -> CheckedReply:
    other = [f"{n.text} {in_commands(n.next_steps)}" for n in config.notices if n.kind == "other_policy"]
    there = "" if config.policy_file.exists() else ", which does not exist"
    return CheckedReply(
        what="policy", ok=not other, found=" ".join(other) or f"{config.policy_file}{there}, {config.digest[:19]}"
    )


def _notes() -> CheckedReply:
    try:
        ok, found = summary(open_context("doctor"))
        return CheckedReply(what="notes", ok=ok, found=found)
    except WardenError as error:
        return CheckedReply(what="notes", ok=False, found=f"{error.message} {in_commands(error.next_steps)}")


def _disk(home: Path) -> CheckedReply:
    existing = next(p for p in (home, *home.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    return CheckedReply(what="disk", ok=free > 100 << 20, found=f"{free / 2**30:.1f} GiB free at {existing}")


def _program(name: str, why: str) -> CheckedReply:
    path = shutil.which(name)
    return CheckedReply(what=name, ok=path is not None, found=path or f"not installed; it {why}")
