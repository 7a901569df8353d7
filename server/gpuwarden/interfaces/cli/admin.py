"""Commands for the installation: doctor, setup, hooks, mcp, demo."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async, without_secrets
from gpuwarden.interfaces.launch import CLIENT_NAMES

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

MOST_OTHERS: Final = 3
"""Maximum number of servers with a different ledger or policy that a reply lists."""


@cli.command()
@click.option(
    "--ledger", is_flag=True, help="Instead, check every event in the ledger, and show the first invalid event."
)
@JSON
@runs_async
async def doctor(as_json: bool, ledger: bool) -> int:
    """Show every setting and its origin, and check the setup."""
    from gpuwarden.interfaces.cli.doctor import examine, examine_ledger

    if ledger:
        return answer(await examine_ledger(), as_json, "message")
    return answer(await examine(), as_json, "doctor")


@cli.command()
@click.argument("names", nargs=-1, metavar="[CLIENT...]", type=click.Choice(CLIENT_NAMES))
@click.option("--yes", is_flag=True, help="Write without asking. Only missing entries are added.")
@click.option("--undo", is_flag=True, help="Remove the entries that setup wrote, after asking at a terminal.")
@click.option("--no-rehearsal", is_flag=True, help="Don't rehearse a job through each client's entry.")
@JSON
@runs_async
async def setup(names: tuple[str, ...], yes: bool, undo: bool, no_rehearsal: bool, as_json: bool) -> int:
    """Add the server and the guard to your agents' clients.

    The command shows the lines to add to each file and asks before it writes. Without a terminal, --yes is required. At
    a terminal, without --yes, setup then asks for the caps, the keys and automatic teardown. At the end, setup
    rehearses a job through each client's entry, at no cost.

    Clients: claude, codex, gemini, cursor, vscode, zed; default: all installed clients.
    """
    from gpuwarden.config import load_config
    from gpuwarden.core.errors import Refused
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.cli.approval import has_terminal, open_terminal
    from gpuwarden.interfaces.cli.demo import demo_spec
    from gpuwarden.interfaces.cli.questions import NOT_ASKED, ask_all
    from gpuwarden.interfaces.setup.use_case import carry_out, make_plan, take_back, try_out

    config = load_config()
    if undo:
        with open_terminal() as terminal:
            if terminal.ask("Type yes to remove the entries that gpuwarden setup wrote: ") != "yes":
                raise Refused("the setup was not undone; nothing was changed")
        return answer(take_back(names, config, os.environ), as_json, "setup")
    person = has_terminal() and not as_json
    plan = make_plan(names, config, os.environ, person=person)
    if not plan.empty and not yes:
        if not person:
            plan.reply.hint = "Nothing was written. Run gpuwarden setup --yes to write the changes."
            plan.reply.policy = NOT_ASKED
            return answer(plan.reply, as_json, "setup")
        console.setup(without_secrets(plan.reply))
        with open_terminal() as terminal:
            if terminal.ask("Type yes to write these changes: ") != "yes":
                raise Refused("nothing was written")
        plan.reply.changes.clear()
    reply = carry_out(plan, config, os.environ)
    reply.policy = await ask_all(os.environ) if person and not yes else NOT_ASKED
    if not no_rehearsal:
        show = (lambda text: None) if as_json else console.plain_line
        spec = demo_spec().model_copy(update={"args": ("40", "20")})  # fewer steps than in the demo
        await try_out(plan, reply, spec, os.environ, show)
    return answer(reply, as_json, "setup")


@cli.command()
@click.argument("action", type=click.Choice(["install", "uninstall", "status"]), metavar="ACTION")
@click.option(
    "--client",
    "names",
    multiple=True,
    type=click.Choice(["claude", "codex", "gemini", "cursor"]),
    help="Only this client.",
)
@JSON
def hooks(action: str, names: tuple[str, ...], as_json: bool) -> int:
    """Install, uninstall or show the guard for agents' shells.

    The guard blocks the usual ways to bypass gpuwarden, such as `vastai destroy`, `sky down` or `rm -rf` of a live run.
    """
    from gpuwarden.config import load_config
    from gpuwarden.interfaces.hooks.install import hooks as use_case

    return answer(use_case(action, names, load_config(), os.environ), as_json, "hooks")


@cli.command()
@click.option(
    "--client", default="", metavar="NAME", help="Name of the client that starts the server, for gpuwarden doctor."
)
@click.option("--channel", is_flag=True, help="Send the watch's alerts to Claude Code as messages (a preview).")
def mcp(client: str, channel: bool) -> int:
    """Serve the tools to an MCP client, over stdio."""
    from gpuwarden.interfaces.mcp.stdio import serve_stdio

    with contextlib.ExitStack() as listed:
        serve_stdio(lambda: open_server("mcp", client, listed), channel=channel)
    return 0


def open_server(door: str, client: str, listed: contextlib.ExitStack) -> Context:
    """Open the ledger for a server, and add notices about servers that use another ledger or policy.

    The new server stays registered until `listed` closes.
    """
    from gpuwarden.policy_record import Notice, absolute
    from gpuwarden.running_servers import elsewhere, entered

    ctx = open_context(door)
    place = absolute(ctx.home), ctx.active_policy.file or absolute(ctx.home)
    others = [Notice("other_server", s.title, s.home, about=s.policy) for s in elsewhere(*place)]
    ctx.more_notices = tuple(others[:MOST_OTHERS])
    listed.enter_context(entered(client, *place))
    return ctx


@cli.command()
@click.option(
    "--yes",
    is_flag=True,
    help="Approve the demo's teardown without a prompt; the ledger records this. Implied without a terminal.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep all files in this folder."
)
@click.option("--overnight", is_flag=True, help="Simulate a night that ends with automatic teardown.")
@JSON
@runs_async
async def demo(yes: bool, keep: Path | None, overnight: bool, as_json: bool) -> int:
    """Show one training job from start to teardown, at no cost."""
    from functools import partial

    from gpuwarden.interfaces.cli.demo import one_life, play

    if overnight:
        from gpuwarden.interfaces.cli.overnight import one_night

        return await play(one_night, as_json=as_json, keep=keep)
    return await play(partial(one_life, yes=yes), as_json=as_json, keep=keep)
