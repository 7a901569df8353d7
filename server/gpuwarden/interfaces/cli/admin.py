"""Commands on the installation: doctor, hooks, mcp, demo, rehearse-hub, rehearse-world."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from gpuwarden.core.errors import BadRequest
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
def mcp() -> NoReturn:
    """Serve the tools to an MCP client, over stdio."""
    import anyio

    from gpuwarden.interfaces.mcp.server import run_stdio

    anyio.run(run_stdio, open_context("mcp"))
    raise SystemExit(0)


@cli.command()
@click.option("--yes", is_flag=True, help="Answer the demo's one question with yes; recorded as such.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), default=None, help="Keep everything in this folder."
)
@JSON
@runs_async
async def demo(yes: bool, keep: Path | None, as_json: bool) -> int:
    """Walk one training job through its whole life, at no cost."""
    from gpuwarden.interfaces.cli.demo import play

    return await play(yes=yes, as_json=as_json, keep=keep)


@cli.command("rehearse-hub")
@click.option(
    "--root", type=click.Path(path_type=Path, file_okay=False), help="Where its repos live; a fresh folder if omitted."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="A free one if omitted.")
def rehearse_hub(root: Path | None, port: int) -> int:
    """Serve a Hub of pretend repos, for practice offline."""
    import tempfile

    from gpuwarden.rehearsal.hub.server import serve

    with tempfile.TemporaryDirectory(prefix="gpuwarden-hub-") as fresh:
        serve(root or Path(fresh), port, click.echo)
    return 0


@cli.command("rehearse-world", hidden=True)
def rehearse_world() -> int:
    """Play the other side of a pretend world for an evaluation: orders as JSON lines, answers the same way."""
    from gpuwarden.lifecycle.records import story
    from gpuwarden.providers.rehearsal import RehearsalProvider
    from gpuwarden.rehearsal.cloud import Cloud
    from gpuwarden.rehearsal.console import Console

    ctx = open_context("world")

    def cloud(platform: str) -> Cloud:
        provider = ctx.provider(platform)
        if not isinstance(provider, RehearsalProvider):
            raise BadRequest(f"{platform} is no rehearsal", "Name a rehearsal/ platform.")
        return provider.cloud

    for reply in Console(cloud, lambda: [e.as_dict() for e in story(ctx.ledger, None)]).serve(sys.stdin):
        click.echo(reply)
    return 0
