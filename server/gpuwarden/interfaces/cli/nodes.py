"""The command that checks several nodes before a job runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, name_values, runs_async


def _script_of(words: Sequence[str]) -> str | None:
    """Return the content of the Python file that a command runs, or None if the file is not on this machine."""
    from gpuwarden.static_analysis.script import decode

    file = next((Path(word) for word in words if word.endswith(".py") and Path(word).is_file()), None)
    return decode(file.read_bytes()) if file else None


@cli.group()
def nodes() -> None:
    """Check several nodes before a job runs on them."""


@nodes.command()
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("--port", type=click.IntRange(1, 65535), default=29_500, show_default=True, help="Port for the ranks.")
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="An environment variable for the job.")
@click.option("--python", default="", metavar="PATH", help="The job's Python; default: the first Python with torch.")
@click.option("--command", "words", default="", metavar="COMMAND", help="The command that each node will run.")
@click.option(
    "--size",
    "mb",
    type=click.IntRange(0, 4096),
    default=8,
    help="Megabytes to all-reduce over all nodes; 0 skips the all-reduce.",
)
@click.option(
    "--within", "within_s", type=click.IntRange(5, 600), default=30, help="Seconds that ranks wait for each other."
)
@JSON
@runs_async
async def check(
    hosts: tuple[str, ...],
    port: int,
    env: tuple[str, ...],
    python: str,
    words: str,
    mb: int,
    within_s: int,
    as_json: bool,
) -> int:
    """Check that a job can run on several nodes together.

    HOST is a host from your SSH configuration, or `local`; the first host is the rendezvous. The command checks the
    fabric manager, interfaces, packet sizes, ports, clocks and versions, and the timeouts and restarts in --command.
    Then it runs an all-reduce of a few megabytes over all nodes. Exit code 0: all checks passed; 1: a check failed; 2:
    a check was inconclusive.
    """
    import shlex

    from gpuwarden.core.clock import SystemClock
    from gpuwarden.core.errors import BadRequest
    from gpuwarden.interfaces.results.nodes import nodes_reply
    from gpuwarden.lifecycle.nodes import NodeCheckSettings, check_nodes
    from gpuwarden.static_analysis.group_launch import read_launch
    from gpuwarden.static_analysis.script import read_script

    pairs = dict(name_values("--env", env, "Write --env NCCL_DEBUG=INFO, for example."))
    try:
        argv = shlex.split(words)
    except ValueError as error:
        raise BadRequest(f"the command can't be read: {error}", "Quote the command as in a shell.") from None
    text = _script_of(argv)
    launch = read_launch(argv, pairs, read_script(text, pairs, argv) if text is not None else None)
    wanted = NodeCheckSettings(port=port, python=python, size=mb << 20, within_s=within_s, launch=launch)
    return answer(nodes_reply(await check_nodes(hosts, wanted, SystemClock())), as_json, "nodes")
