"""The command that shows and exports a job's metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async


@cli.command()
@click.argument("job_id")
@click.option("--csv", "as_csv", is_flag=True, help="Print every point as CSV.")
@click.option(
    "--tensorboard",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a TensorBoard event file to this folder.",
)
@click.option("--trackio", metavar="PROJECT", help="Log every step to this trackio project.")
@JSON
@runs_async
async def metrics(job_id: str, as_csv: bool, tensorboard: Path | None, trackio: str | None, as_json: bool) -> int:
    """Show the metrics that a job reported, or export them.

    Metrics that are still on the machine are fetched first, if the machine is reachable.
    """
    from gpuwarden.core.errors import BadRequest, WardenError
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.reports import pull_reports
    from gpuwarden.lifecycle.records import read_job
    from gpuwarden.metrics import export

    if as_csv + (tensorboard is not None) + (trackio is not None) > 1 or (as_csv and as_json):
        raise BadRequest(
            "only one export at a time",
            "Pass --csv, --tensorboard or --trackio; --csv can't be combined with --json.",
        )
    ctx = open_context()
    job, note = read_job(ctx.ledger, job_id), ""
    try:
        await pull_reports(ctx, job)
    except WardenError as error:
        note = f"The machine could not be read ({error.message}); these metrics were fetched earlier."
    if as_csv:
        export.to_csv(ctx.metrics, job.id, sys.stdout)
        if note:
            click.echo(note, err=True)
        return 0
    if tensorboard is not None:
        note = f"Wrote {export.to_tensorboard(ctx.metrics, job.id, tensorboard)}. {note}".strip()
    elif trackio is not None:
        note = f"{export.to_trackio(ctx.metrics, job.id, trackio)} steps were logged to trackio. {note}".strip()
    return answer(results.reported(ctx.metrics, job.id, note), as_json, "reported")
