"""Commands that show the active policy or activate another policy file."""

from __future__ import annotations

from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.group()
def policy() -> None:
    """Show the active policy, or activate another policy file."""


@policy.command(name="show")
@JSON
def show(as_json: bool) -> int:
    """Show the active policy file and every value with its origin."""
    from gpuwarden.interfaces.cli.policy_choice import show_policy

    return answer(show_policy(), as_json, "policy")


@policy.command(name="use")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@JSON
@runs_async
async def use(file: Path, as_json: bool) -> int:
    """Activate the policy FILE for this ledger.

    The command asks the user for confirmation at a terminal, and for the currently active policy's PIN. No flag or
    variable replaces the answer.
    """
    from gpuwarden.interfaces.cli.policy_choice import use_policy

    return answer(await use_policy(open_context(), file), as_json, "message")


@policy.command(name="allow")
@click.argument("what", type=click.Choice(["local"]), metavar="WHAT")
@JSON
@runs_async
async def allow(what: str, as_json: bool) -> int:
    """Allow `local`: let jobs run on this machine even if no sandbox works.

    The command asks the user for confirmation at a terminal; no flag or variable replaces the answer.
    """
    from gpuwarden.interfaces.cli.approval import allow_local

    assert what == "local"
    return answer(await allow_local(open_context()), as_json, "message")
