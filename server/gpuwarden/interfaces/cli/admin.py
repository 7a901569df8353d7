"""Commands on the installation: doctor, hooks, mcp, demo."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.command()
@click.option("--ledger", is_flag=True, help="Check every event of the ledger instead, and name the first broken one.")
@JSON
@runs_async
async def doctor(as_json: bool, ledger: bool) -> int:
    """Show every setting with its origin, and what is missing."""
    from gpuwarden.interfaces.cli.doctor import examine, examine_ledger

    if ledger:
        return answer(await examine_ledger(), as_json, "message")
    return answer(await examine(), as_json, "doctor")


@cli.command()
@click.argument("action", type=click.Choice(["install", "uninstall", "status"]), metavar="ACTION")
@click.option(
    "--client", "names", multiple=True, type=click.Choice(["claude", "codex", "cursor"]), help="Only this one."
)
@JSON
def hooks(action: str, names: tuple[str, ...], as_json: bool) -> int:
    """Guard an agent's shell: install, uninstall, status.

    It stops the usual ways around gpuwarden: `vastai destroy`, `sky down`, `rm -rf` of a live run.
    """
    from gpuwarden.config import load_config
    from gpuwarden.interfaces.hooks.install import hooks as use_case

    return answer(use_case(action, names, load_config(), os.environ), as_json, "hooks")


@cli.command()
@click.option("--write-answers", is_flag=True, hidden=True, help="Write the snapshot of the first answers again.")
def mcp(write_answers: bool) -> int:
    """Serve the tools to an MCP client, over stdio."""
    from gpuwarden.interfaces.mcp.stdio_start import start

    if not write_answers:
        return start(lambda: open_context("mcp"))
    import anyio

    from gpuwarden.interfaces.mcp import stdio

    anyio.run(stdio.write_answers, open_context("mcp"))
    return 0


@cli.command()
@click.option(
    "--yes",
    is_flag=True,
    help="Answer the demo's one question with yes; recorded as such. Without a terminal it is implied.",
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep everything in this folder."
)
@click.option("--overnight", is_flag=True, help="A night in pretend hours instead: a standing order ends the machine.")
@JSON
@runs_async
async def demo(yes: bool, keep: Path | None, overnight: bool, as_json: bool) -> int:
    """Walk one training job through its whole life, at no cost."""
    from functools import partial

    from gpuwarden.interfaces.cli.demo import one_life, play

    if overnight:
        from gpuwarden.interfaces.cli.overnight import one_night

        return await play(one_night, as_json=as_json, keep=keep)
    return await play(partial(one_life, yes=yes), as_json=as_json, keep=keep)
