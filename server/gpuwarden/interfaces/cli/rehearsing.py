"""The command that rehearses a script's first step on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, name_values, open_context, runs_async
from gpuwarden.interfaces.cli.script_words import RunsProgram, read_script_file


@cli.command(cls=RunsProgram)
@click.argument("what", nargs=-1, required=True, metavar="SCRIPT [ARGS]...")
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="A plain variable, never a secret.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A secret; the script gets a dummy value.")
@click.option("--input", "inputs", multiple=True, metavar="PATH", help="A file or folder that the script needs.")
@JSON
@runs_async
async def rehearse(
    what: tuple[str, ...], envs: tuple[str, ...], secrets: tuple[str, ...], inputs: tuple[str, ...], as_json: bool
) -> int:
    """Run a script's first step here, without a GPU.

    A first step is one optimizer step, one save and one resume. It runs in the sandbox for local jobs, without network
    or secrets, and with small models and few rows. The user is asked once for each script and its arguments. The exit
    code is 1 if the script fails, and 2 if the script can't be rehearsed.
    """
    from gpuwarden.core.inputs import build
    from gpuwarden.core.models import JobSpec
    from gpuwarden.interfaces.cli.approval import ask_consent
    from gpuwarden.interfaces.results.rehearsal import rehearsed
    from gpuwarden.lifecycle.submission.rehearsing import rehearse_script

    program, *args = what
    given = {
        "name": Path(program).stem[:40],
        "platform": "local",
        "script": read_script_file(Path(program)),
        "args": args,
        "env": dict(name_values("--env", envs, "Use --secret NAME for a secret.")),
        "secrets": secrets,
        "inputs": inputs,
    }
    ctx, spec = open_context(), build(JobSpec, given)
    await ask_consent(ctx, spec)
    found = await rehearse_script(ctx, spec)
    return answer(rehearsed(found, ctx.hidden(found.outcome.log, spec.secrets)), as_json, "rehearsal")
