"""Ask the user at a terminal for the caps, the platforms' keys and automatic teardown.

Answers that differ from the policy file are shown, confirmed and recorded, just like a new policy file. A key is read
without echo and stored only in a file that only the user may read; no argument, variable or client file contains it.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from gpuwarden.config import in_short, load_config, read_policy, value_at
from gpuwarden.core.errors import AuthFailed, Conflict, Refused, WardenError
from gpuwarden.core.inputs import describe_error
from gpuwarden.core.policy import Policy
from gpuwarden.interfaces.cli.approval import Terminal, open_terminal, with_values
from gpuwarden.interfaces.cli.base import open_context
from gpuwarden.interfaces.cli.policy_choice import confirm_change, record_choice
from gpuwarden.interfaces.variables import documented
from gpuwarden.lifecycle.context import Context
from gpuwarden.policy_record import digest_of
from gpuwarden.private import private_folder, write_private
from gpuwarden.providers._account import read_key
from gpuwarden.providers.base import PROVIDERS

QUESTIONS: Final = {
    "caps.per_job_usd": "Cost per job that needs no approval, in USD",
    "caps.per_day_usd": "Cost per day that needs no approval, in USD",
    "caps.per_instance_usd": "Cost per instance that needs no approval, in USD",
    "teardown.automatic": "Automatic teardown after a proven job: off, stop or terminate",
}
NOT_ASKED: Final = (
    "The policy was not changed. To set the caps, the platforms' keys and automatic teardown, run gpuwarden setup "
    "yourself at a terminal, without --yes, or see docs/policy.md and docs/platforms.md."
)


async def ask_all(env: Mapping[str, str], terminal: Terminal | None = None) -> str:
    """Ask all questions at the terminal, and return the outcome for the policy. An empty answer changes nothing."""
    if terminal is None:
        with open_terminal() as opened:
            return await ask_all(env, opened)
    try:
        outcome = await ask_policy(open_context(), terminal)
    except WardenError as error:
        outcome = f"{error.message[:1].upper()}{error.message[1:]}."
    ask_keys(env, load_config(env).policy_file.parent / "keys", terminal)
    return outcome


async def ask_policy(ctx: Context, terminal: Terminal) -> str:
    """Ask for the caps and automatic teardown, and write the values that differ. Raises Refused, or Conflict if the
    file has changed in the meantime.
    """
    config = load_config(ctx.env)
    if any(notice.question for notice in config.notices):
        raise Refused(
            "the policy was not changed, because this shell uses a different ledger or policy than the recorded one; "
            "see gpuwarden doctor"
        )
    if "terminal" not in ctx.policy.approval.channels:
        raise Refused("the policy was not changed, because it does not allow approval at a terminal")
    file = config.policy_file
    text = file.read_text("utf-8") if file.exists() else ""
    before = read_policy(file)[0] if file.exists() else Policy()
    after = before
    terminal.say(f"Policy file {file}. Enter keeps the value in brackets.")
    for path, question in QUESTIONS.items():
        after = _ask(terminal, after, path, question)
    if after == before:
        return "The policy is unchanged."
    values = {path: new for path in QUESTIONS if (new := value_at(after, path)) != value_at(before, path)}
    rounded = {path: int(new) if isinstance(new, float) and new.is_integer() else new for path, new in values.items()}
    changed = with_values(text, rounded)
    if Policy.model_validate(tomllib.loads(changed)) != after:
        raise Conflict(f"the values can't be set in {file}; edit it yourself")
    await confirm_change(ctx, before, after, terminal, "Type yes to change the policy: ")
    if (file.read_text("utf-8") if file.exists() else "") != text:
        raise Conflict("the policy file was changed in the meantime", "Run gpuwarden setup again.")
    private_folder(file.parent)
    write_private(file.resolve(), changed)
    record_choice(ctx, config, file, digest_of(changed.encode()))
    return f"The policy was changed: {file}."


def _ask(terminal: Terminal, policy: Policy, path: str, question: str) -> Policy:
    """Ask for one value until it is valid. Return the policy with the value."""
    table, key = path.split(".")
    while typed := terminal.ask(f"{question} [{in_short(value_at(policy, path))}]: ").removeprefix("$"):
        values = policy.model_dump()
        values[table][key] = typed
        try:
            return Policy.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            terminal.say(f"  {describe_error(first['type'], first['msg'])}")
    return policy


def ask_keys(env: Mapping[str, str], folder: Path, terminal: Terminal) -> None:
    """Show which platforms have a key, and store missing keys in files that only the user may read."""
    lacking: dict[str, str] = {}
    for name, module in PROVIDERS.usable():
        if not module.ACCOUNT_KEYS:
            continue
        variable = module.ACCOUNT_KEYS[0]
        given = next((known for known in (variable, f"{variable}_FILE") if env.get(known)), None)
        by_file = f"{variable}_FILE" in dict(documented(module))
        found = f"{given} is set" if given else f"no key; {variable} sets it"
        if given and by_file:
            try:
                read_key(variable, name, env)
            except AuthFailed as error:
                found = f"{found}, but {error.message}"
        elif by_file and (folder / variable).exists():
            found = f"no key; {_export(folder, variable)}"
        elif by_file:
            found = f"no key; {variable} or {variable}_FILE sets it"
            lacking[name] = variable
        terminal.say(f"  {name:16} {found}")
    if not lacking:
        return
    wanted = terminal.ask("Platforms to store a key for, separated by spaces (Enter: none): ")
    for name in wanted.replace(",", " ").split():
        if name not in lacking:
            terminal.say(f"  skipped: {name} is unknown, already has a key, or does not support key files")
        elif key := terminal.secret(f"Key for {name} (not shown): ").strip():
            variable = lacking[name]
            try:
                read_key(variable, name, {variable: key})
            except AuthFailed as error:
                terminal.say(f"  not stored: {error.message}")
                continue
            write_private(private_folder(folder) / variable, key)
            terminal.say(f"  stored; {_export(folder, variable)}")


def _export(folder: Path, variable: str) -> str:
    file = shlex.quote(str(folder / variable))
    return f"to use it, add this line to your shell's profile: export {variable}_FILE={file}"
