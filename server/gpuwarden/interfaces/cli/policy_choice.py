"""Show the active policy, or activate another policy file. Activation requires confirmation at a terminal."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import Field

from gpuwarden.config import Config, load_config, read_policy, value_at
from gpuwarden.core.errors import Refused
from gpuwarden.core.policy import Policy, policy_fields
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.cli.approval import Terminal, check_pin, open_terminal, user
from gpuwarden.interfaces.cli.doctor import (
    SettingReply,
    in_short_unless_secret,
    setting_rows,
)
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import Result, WarnedReply, warned
from gpuwarden.ledger.events import PolicyAccepted
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.team import check_approver
from gpuwarden.policy_record import Record, absolute, write_record
from gpuwarden.running_servers import remember


class PolicyReply(WarnedReply):
    """The active policy file and its values. `since` is the time at which the file's current text was recorded."""

    file: str
    exists: bool
    digest: str
    since: float | None = None
    settings: list[SettingReply] = Field(default_factory=list)


def show_policy() -> PolicyReply:
    """Return the active policy. Raises BadRequest if it can't be read."""
    config = load_config()
    known = config.recorded
    reply = PolicyReply(
        file=str(config.policy_file),
        exists=config.policy_file.exists(),
        digest=config.digest,
        since=known.at if known and known.digest == config.digest else None,
        settings=setting_rows(config),
    )
    return warned(reply, config.notices, in_commands)


async def use_policy(ctx: Context, path: Path) -> Result:
    """Ask the user at the terminal to activate the policy file `path`. Raises Refused if the answer is no."""
    if "terminal" not in ctx.policy.approval.channels:
        raise Refused(
            "the active policy does not allow approval at a terminal, so no other file can be accepted",
            "Edit the active policy file; gpuwarden policy show prints its path.",
        )
    with open_terminal() as terminal:
        return await ask_use(ctx, path, terminal)


async def ask_use(ctx: Context, path: Path, terminal: Terminal) -> Result:
    """Ask on a given terminal whether to activate a policy file.

    The PIN comes from the active policy, so that a new file can't supply its own PIN.
    """
    file = absolute(path)
    policy, digest = read_policy(file)
    before = load_config(ctx.env)
    terminal.say(f"policy file {line(str(file), 400)}")
    terminal.say(f"  active now: {line(str(before.policy_file), 400)}")
    terminal.say(f"  for the ledger in {line(str(absolute(ctx.home)), 400)}")
    await confirm_change(ctx, before.policy, policy, terminal, "Type yes to activate it: ")
    record_choice(ctx, before, file, digest)
    return Result(
        message=f"{file} is now the policy file of the ledger in {ctx.home}.",
        hint="Running servers apply it immediately. Notes and profiles next to it are read when a server starts.",
    )


async def confirm_change(ctx: Context, before: Policy, after: Policy, terminal: Terminal, prompt: str) -> None:
    """Show the changed values, and ask an approver for confirmation and the PIN. Raises Refused."""
    check_approver(ctx)
    rows = [(f.path, value_at(before, f.path), value_at(after, f.path)) for f in policy_fields()]
    changes = [row for row in rows if row[1] != row[2]]
    for name, *values in changes:
        # The PIN's hash and webhook addresses, which are as secret as a key, are not shown.
        old, new = (in_short_unless_secret(name, value) for value in values)
        text = f"{name}: {old} -> {new if new != old else 'another value'}"
        terminal.say(f"  {line(text, 400)}")
    if not changes:
        terminal.say("  nothing changes")
    if terminal.ask(prompt) != "yes":
        raise Refused("not accepted; the policy was not changed", "gpuwarden policy show prints the active policy.")
    await check_pin(ctx, terminal)


def record_choice(ctx: Context, before: Config, file: Path, digest: str) -> None:
    """Record, in the ledger and in a file next to it, that the user activated a policy file."""
    accepted = PolicyAccepted(
        path=str(file),
        digest=digest,
        was_path=str(before.policy_file),
        was_digest=before.digest,
        channel="terminal",
        by=user(),
    )
    ctx.ledger.add("policy/file", accepted)
    write_record(ctx.home, Record(path=str(file), digest=digest, at=ctx.clock.now(), chosen=True))
    with contextlib.suppress(OSError):
        remember(absolute(ctx.home))
