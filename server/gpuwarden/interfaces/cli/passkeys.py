"""Commands for the passkeys that can approve requests on the page: passkey add, list, remove."""

from __future__ import annotations

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.group()
def passkey() -> None:
    """Add, list and remove passkeys for approvals on the page."""


@passkey.command()
@click.argument("name")
@click.option("--person", default="", metavar="NAME", help="Owner of the passkey; default: you.")
@JSON
@runs_async
async def add(name: str, person: str, as_json: bool) -> int:
    """Show a code that registers one passkey on the page.

    The code is valid for five minutes. The command asks the user for confirmation at a terminal, and for the PIN if one
    is set. The code appears only on that terminal.
    """
    from gpuwarden.core.errors import Refused
    from gpuwarden.interfaces.cli.approval import check_pin, open_terminal, user
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.teardown.passkeys import allow
    from gpuwarden.people import current_user

    ctx = open_context()
    with open_terminal() as terminal:
        of = f" of {person}" if person else ""
        terminal.say(f"The holder of the passkey {name}{of} can approve spending and teardown on the page.")
        if terminal.ask("Type yes to allow it: ") != "yes":
            raise Refused("not allowed; nothing was changed")
        await check_pin(ctx, terminal)
        code = allow(ctx, name, user(), person or current_user())
        terminal.say(f"Open /passkeys on the page (gpuwarden dashboard) and type: {code}")
    return answer(Result(message="The code can be used once, within five minutes."), as_json, "message")


@passkey.command(name="list")
@JSON
def list_passkeys(as_json: bool) -> int:
    """List the passkeys that may approve on the page."""
    from gpuwarden.interfaces.cli.drawing import local
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.teardown.passkeys import passkeys

    known = passkeys(open_context())
    rows = [
        f"{one.name} ({one.person or 'unknown'}, {one.site}, since {local(one.registered_at, '%Y-%m-%d %H:%M')})"
        for one in known
    ]
    return answer(Result(message="; ".join(rows) or "No passkey is registered."), as_json, "message")


@passkey.command(name="remove")
@click.argument("name")
@JSON
def remove_passkey(name: str, as_json: bool) -> int:
    """Remove a passkey, so that it can no longer approve."""
    from gpuwarden.interfaces.cli.approval import user
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.teardown.passkeys import remove

    remove(open_context(), name, user())
    return answer(Result(message=f"The passkey {name} can no longer approve."), as_json, "message")
