"""Commands on the passkeys with which you approve on the page: passkey add, list, remove."""

from __future__ import annotations

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.group()
def passkey() -> None:
    """Let a passkey approve on the page, list them, take one back."""


@passkey.command()
@click.argument("name")
@click.option("--person", default="", metavar="NAME", help="Whose it is; without it, yours.")
@JSON
@runs_async
async def add(name: str, person: str, as_json: bool) -> int:
    """Show a code with which you register a passkey on the page, once, within five minutes.

    It asks a person at a terminal, and for the PIN where one is set; the code appears on that terminal only.
    """
    from gpuwarden.core.errors import Refused
    from gpuwarden.interfaces.cli.approval import check_pin, open_terminal, user
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.teardown.passkeys import allow
    from gpuwarden.people import user_here

    ctx = open_context()
    with open_terminal() as terminal:
        of = f" of {person}" if person else ""
        terminal.say(f"Whoever has the passkey {name}{of} will approve spending and the end of machines on the page.")
        if terminal.ask("Type yes to allow it: ") != "yes":
            raise Refused("not allowed; nothing was changed")
        await check_pin(ctx, terminal)
        code = allow(ctx, name, user(), person or user_here())
        terminal.say(f"Open /passkeys on the page (gpuwarden dashboard) and type: {code}")
    return answer(Result(message="The code works once, for five minutes."), as_json, "message")


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
    """Take a passkey back; from now on it approves nothing."""
    from gpuwarden.interfaces.cli.approval import user
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.teardown.passkeys import remove

    remove(open_context(), name, user())
    return answer(Result(message=f"The passkey {name} approves nothing any more."), as_json, "message")
