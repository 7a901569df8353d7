"""Commands for the rehearsal: rehearse-hub, rehearse-cloud."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli.base import cli, open_context


@cli.command("rehearse-hub")
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the Hub's repos; default: a temporary folder.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Default: a free port.")
def rehearse_hub(root: Path | None, port: int) -> int:
    """Serve an emulated Hub on loopback, to practice offline."""
    import tempfile

    from gpuwarden.config import load_config
    from gpuwarden.rehearsal.hub.server import serve

    with tempfile.TemporaryDirectory(prefix="gpuwarden-hub-") as fresh:
        serve(root or Path(fresh), port, click.echo, unsandboxed=load_config().policy.local.unsandboxed)
    return 0


@cli.command("rehearse-cloud", hidden=True)
def rehearse_cloud() -> int:
    """Control a rehearsal's cloud for an evaluation: read commands as JSON lines, write replies as JSON lines."""
    from gpuwarden.lifecycle.records import story
    from gpuwarden.providers.rehearsal import RehearsalProvider
    from gpuwarden.rehearsal.cloud import Cloud
    from gpuwarden.rehearsal.console import Console

    ctx = open_context("evaluation")

    def cloud(platform: str) -> Cloud:
        provider = ctx.provider(platform)
        if not isinstance(provider, RehearsalProvider):
            raise BadRequest(f"{platform} is not a rehearsal", "Name a platform that starts with rehearsal/.")
        return provider.cloud

    for reply in Console(cloud, lambda: [e.as_dict() for e in story(ctx.ledger, None)]).serve(sys.stdin):
        click.echo(reply)
    return 0
