"""Commands for one job: submit, check, cancel, pull, verify."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli.base import (
    JSON,
    VERBS,
    answer,
    cli,
    fail,
    name_values,
    open_context,
    runs_async,
    warned,
    without_secrets,
)
from gpuwarden.interfaces.cli.script_words import RunsProgram, read_script_file

LEVELS = click.Choice(["structure", "content", "load", "resume"])


@cli.command(cls=RunsProgram)
@click.argument("what", nargs=-1)
@click.option(
    "--platform",
    default=None,
    help="Platform; see `gpuwarden profiles`. rehearsal/NAME is simulated.",
)
@click.option("--name", default=None, help="Short name; default: the script's name.")
@click.option("--project", default=None, help="Tag for `gpuwarden costs`.")
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="A plain variable, never a secret.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="An environment variable to pass as a secret.")
@click.option(
    "--input", "inputs", multiple=True, metavar="PATH", help="A file or folder to upload from the working directory."
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="PATH",
    help="An output to keep, relative to the job's working folder.",
)
@click.option(
    "--artifact-store", default="", metavar="URL",
    help="Upload the outputs as they are saved: s3://bucket/path or hf://owner/repo/path.",
)  # fmt: skip
@click.option(
    "--timeout", "timeout_s", type=int, metavar="SECONDS", help="Hard time limit; default: the estimate plus 30%."
)
@click.option("--estimate", "estimate_s", type=int, metavar="SECONDS", help="Expected run time.")
@click.option("--max-cost", "max_cost_usd", type=float, metavar="USD", help="Stop the job at this cost.")
@click.option("--gpu", default=None, help="GPU name.")
@click.option(
    "--or", "alternatives", multiple=True, metavar="PLATFORM[:GPU]",
    help="Alternative if the platform has no capacity. If repeated, tried in the given order.",
)  # fmt: skip
@click.option("--gpus", "gpu_count", type=int, default=1, show_default=True, help="Number of GPUs.")
@click.option("--disk", "disk_gb", type=int, default=None, metavar="GB", help="Disk size.")
@click.option(
    "--interruptible", is_flag=True, help="Use cheaper capacity that may be interrupted; the job then resumes."
)
@click.option("--durable-storage", is_flag=True, help="Request the storage tier that survives teardown.")
@click.option("--teardown", type=VERBS, default="terminate", show_default=True, help="How to tear down the machine.")
@click.option("--max-restarts", type=int, default=3, show_default=True, help="Maximum relaunches after interruptions.")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE",
    help="An option of this platform (see its profile); VALUE may be JSON.",
)  # fmt: skip
@click.option("--image", default=None, help="Container image, if the platform supports images.")
@click.option("--region", default=None, help="Data center, region or country, as the platform names it.")
@click.option("--namespace", default=None, help="Hugging Face organization that the job runs in and is billed to.")
@click.option("--dry-run", is_flag=True, help="Check the job without launching it.")
@click.option("--rehearse", is_flag=True, help="Before launch, rehearse the first step on this machine.")
@click.option("--receipt", default=None, help="Receipt from a dry run; without a script, launch the checked job.")
@JSON
@runs_async
async def submit(
    what: tuple[str, ...], as_json: bool, dry_run: bool, rehearse: bool, receipt: str | None, **given: Any
) -> int:
    """Check a job, and launch it.

    WHAT is a script.py with its arguments, or a command. Options after the script are passed to it if it declares them.
    On a rented platform the first call prints a receipt; a call with only --receipt then launches the job.
    """
    from gpuwarden.core.inputs import build
    from gpuwarden.core.models import JobSpec
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.submission.inputs import below
    from gpuwarden.lifecycle.submission.submit import submit as use_case

    for name, missing in (("WHAT", not what), ("--platform", not given["platform"])):
        if missing and (what or not receipt):
            raise click.UsageError(f"Missing {name}.", click.get_current_context())
    given["env"] = dict(name_values("--env", given.pop("envs"), "Use --secret NAME for a secret."))
    given["options"] = read_options(given["options"])
    for wish in ("image", "region", "namespace"):
        if (text := given.pop(wish)) is not None and given["options"].setdefault(wish, text) != text:
            raise BadRequest(f"--{wish} and --option {wish}= differ", "Leave one of them out.")
    ctx = open_context()
    if not what and receipt:
        if dry_run or rehearse:
            raise BadRequest(
                "--receipt without a script can't be combined with --dry-run or --rehearse; nothing was done",
                "Leave the other option out.",
            )
        from gpuwarden.lifecycle.fan_out.launching import FanOutResult
        from gpuwarden.lifecycle.receipts import launch_receipt

        launched = await launch_receipt(ctx, receipt, {k: v for k, v in given.items() if k != "name" or v})
        if isinstance(launched, FanOutResult):
            return answer(warned(results.fanned_out(launched), ctx), as_json, "fanned_out")
        return answer(warned(results.submitted(launched), ctx), as_json, "submitted")
    program, *args = what
    if program.endswith(".py"):
        given |= {"script": read_script_file(Path(program)), "args": args}
        given["name"] = given["name"] or Path(program).stem[:40]
    else:
        given |= {"command": what, "name": given["name"] or Path(program).name[:40] or "job"}
    spec = build(JobSpec, {k: v for k, v in given.items() if v is not None})
    file = below(ctx.cwd or Path.cwd(), Path(program)) if spec.script is not None else ""
    if rehearse:
        from gpuwarden.interfaces.cli.approval import ask_consent

        await ask_consent(ctx, spec)
    found = await use_case(ctx, spec, dry_run=dry_run, receipt=receipt, script_file=file, rehearse=rehearse)
    reply = results.submitted(found)
    return answer(warned(reply, ctx), as_json, "submitted")


def read_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs, each value as JSON if it is valid JSON, else as text. The values of a repeated name form
    a list.
    """
    found: dict[str, Any] = {}
    for name, text in name_values("--option", pairs, "`gpuwarden profiles NAME` lists a platform's options."):
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name in found:
            value = [*(found[name] if isinstance(found[name], list) else [found[name]]), value]
        found[name] = value
    return found


@cli.command()
@click.argument("job_id")
@click.option("--cursor", type=int, default=None, help="Read the log from this byte.")
@click.option(
    "--log-bytes",
    type=click.IntRange(0, 1_000_000),
    default=2_000,
    show_default=True,
    help="Maximum number of log bytes to show.",
)
@click.option("--follow", is_flag=True, help="Poll every two seconds until the job ends.")
@JSON
@runs_async
async def check(job_id: str, cursor: int | None, log_bytes: int, follow: bool, as_json: bool) -> int:
    """Show a job's state, step, metrics, billing and log."""
    from gpuwarden.core.states import TERMINAL_JOBS
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.check import check as use_case

    if job_id.endswith(".py"):  # some tools use `check` for a dry run
        dry = f"Run `gpuwarden submit --dry-run {shlex.quote(job_id)}` to check the script."
        raise BadRequest("`gpuwarden check` expects a job id, but this is a script", dry)
    ctx = open_context()
    while True:
        result = await use_case(ctx, job_id, cursor=cursor, limit=log_bytes)
        ended = not follow or result.job.state in TERMINAL_JOBS
        if ended or not as_json:  # JSON output is one object, so print only the last poll
            reply = results.checked(result, ctx.hidden(result.texts, result.job.spec.secrets))
            code = answer(warned(reply, ctx), as_json, "checked")
        if ended:
            return code
        cursor = result.log.next if result.log else cursor
        await ctx.clock.sleep(2)


@cli.command()
@click.argument("job_id")
@JSON
@runs_async
async def cancel(job_id: str, as_json: bool) -> int:
    """End a job's process: send a signal, then kill it. Its machine keeps running and is billed."""
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.check import cancel as use_case

    ctx = open_context()
    return answer(warned(results.signaled(await use_case(ctx, job_id)), ctx), as_json, "checked")


@cli.command()
@click.argument("job_id")
@JSON
@runs_async
async def pause(job_id: str, as_json: bool) -> int:
    """Let a job save and exit, so that it can be resumed later.

    Its files are kept for `gpuwarden resume`. Its machine keeps running and is billed: `gpuwarden teardown --verb stop`
    requests a stop, which the user approves.
    """
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.check import pause as use_case

    ctx = open_context()
    return answer(warned(results.signaled(await use_case(ctx, job_id)), ctx), as_json, "checked")


@cli.command()
@click.argument("job_id")
@JSON
@runs_async
async def resume(job_id: str, as_json: bool) -> int:
    """Relaunch a paused job from its checkpoint.

    The cost stays within the budget approved for the job, or within the caps. A stopped machine is started.
    """
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.check import resume as use_case

    ctx = open_context()
    return answer(warned(results.signaled(await use_case(ctx, job_id)), ctx), as_json, "checked")


@cli.command()
@click.argument("job_id")
@click.option(
    "--dest",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder to copy to; default: a folder in gpuwarden's home.",
)
@click.option("--also", multiple=True, metavar="PATH", help="A remote path to add to the job's outputs.")
@JSON
@runs_async
async def pull(job_id: str, dest: Path | None, also: tuple[str, ...], as_json: bool) -> int:
    """Copy a job's outputs and log here, and compare digests. Repeat the command to resume a copy."""
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli import console
    from gpuwarden.lifecycle.artifacts.pull import pull as use_case

    with console.transfer_bar(as_json) as progress:
        result = await use_case(open_context(), job_id, dest, also=also, progress=progress)
    return answer(results.pulled(result), as_json, "pulled")


@cli.command()
@click.argument("what")
@click.option(
    "--level",
    type=LEVELS,
    default=None,
    help="Default: load for local files, content on a machine, structure on the Hub.",
)
@click.option(
    "--against",
    metavar="PATH|hf://...",
    help="Compare with an earlier checkpoint, an adapter's base or a GGUF's source.",
)
@click.option(
    "--where",
    type=click.Choice(["auto", "here", "instance"]),
    default="auto",
    show_default=True,
    help="Which copy of a job's outputs to verify.",
)
@click.option("--no-limits", is_flag=True, help="Remove the limits on how much of a file is read.")
@JSON
@runs_async
async def verify(what: str, level: str | None, against: str | None, where: Any, no_limits: bool, as_json: bool) -> int:
    """Prove that a checkpoint is complete and loads.

    WHAT is a job id, hf://owner/name[@revision][/path], or a path. For a job, the pulled copy is verified. If no copy
    has been pulled, or with `--where instance`, the machine verifies its own files: --against is then a path on the
    machine, and the result is marked as reported by the machine. Exit code 0: proven, 1: refuted, 2: inconclusive.

    The headers, opcodes, tensors and unpacked bytes of each file are read up to fixed limits. If a file exceeds a
    limit, the verdict is inconclusive.
    """
    from gpuwarden.checkpoints.file_model import NO_LIMITS
    from gpuwarden.core.errors import WardenError
    from gpuwarden.core.models import Level
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli import console, verify_report
    from gpuwarden.lifecycle.artifacts.verify import verify as use_case
    from gpuwarden.lifecycle.execution.situation import following_of

    ctx = open_context()
    try:
        with console.count_bar(as_json, "verifying") as progress:
            depth = Level(level) if level else None
            limits = NO_LIMITS if no_limits else None
            report = await use_case(ctx, what, depth, against=against, where=where, progress=progress, limits=limits)
    except WardenError as error:
        return fail(error, as_json, code=2)
    report = without_secrets(report)
    if not as_json:
        verify_report.show(report)
    reply = results.verified(report, following_of(ctx, what))
    return answer(reply, as_json, "message")
