"""Commands that show the current state: status, jobs, costs, wait."""

from __future__ import annotations

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async, warned

STATES = click.Choice(
    ["accepted", "provisioning", "submitting", "queued", "running", "preempted", "paused", "unknown", "succeeded",
     "failed", "canceled"]
)  # fmt: skip


@cli.command()
@click.option("--offline", is_flag=True, help="Show the ledger only, without polling platforms and machines.")
@JSON
@runs_async
async def status(offline: bool, as_json: bool) -> int:
    """Show running and ended jobs, open approvals and billing."""
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.overview import overview

    ctx = open_context()
    reply = results.status_of(await overview(ctx, offline=offline))
    return answer(warned(reply, ctx), as_json, "status")


@cli.command()
@click.option("--state", "states", multiple=True, type=STATES, help="Only jobs in this state; can be repeated.")
@click.option("--platform", default="", metavar="NAME", help="Only jobs on this platform.")
@click.option("--project", default="", metavar="TAG", help="Only jobs in this project.")
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Jobs per page.")
@click.option("--after", default="", metavar="JOB", help="Start after this job, the last job of the previous page.")
@JSON
@runs_async
async def jobs(states: tuple[str, ...], platform: str, project: str, limit: int, after: str, as_json: bool) -> int:
    """List all jobs, including ended jobs, latest first."""
    from gpuwarden.core.states import Job
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.overview import job_page

    ctx = open_context()
    wanted = tuple(Job(state) for state in states)
    page = job_page(ctx, states=wanted, platform=platform, project=project, limit=limit, after=after)
    return answer(results.jobs_of(page), as_json, "jobs")


@cli.command()
@click.option(
    "--by",
    type=click.Choice(["day", "platform", "project", "person", "job"]),
    default="day",
    show_default=True,
    help="Group the costs by this key.",
)
@click.option(
    "--days", type=click.IntRange(1, 366), default=30, show_default=True, help="Number of days, including today."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@JSON
@runs_async
async def costs(by: str, days: int, as_csv: bool, as_json: bool) -> int:
    """Show machine costs, by day or another key."""
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.spending import charges, day_start

    ctx = open_context()
    since = day_start(ctx.clock.now(), days - 1)
    reply = warned(results.costs_of(charges(ctx, since), since, by, ctx.policy.team), ctx)
    if as_csv and not as_json:
        from gpuwarden.interfaces.cli.screen import costs_csv

        click.echo(costs_csv(reply), nl=False)
        return 0
    return answer(reply, as_json, "costs")


@cli.command()
@click.argument("job_id")
@click.option(
    "--until", type=click.Choice(["end", "step", "state", "alert"]), default="end", show_default=True,
    help="The event to wait for. The job's end or a new state also ends a wait for a step or an alert.",
)  # fmt: skip
@click.option(
    "--timeout", "seconds", type=click.FloatRange(1, 86_400), default=600, show_default=True, metavar="SECONDS",
    help="Maximum time to wait.",
)  # fmt: skip
@JSON
@runs_async
async def wait(job_id: str, until: str, seconds: float, as_json: bool) -> int:
    """Wait until a job ends, another event occurs or time is up.

    A pause, a preemption or an alert does not end the wait for the job's end. Exit code 0: the job ended or the awaited
    event occurred; 2: the wait timed out.
    """
    from gpuwarden.core.states import TERMINAL_JOBS
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring import wait as use_case
    from gpuwarden.lifecycle.monitoring.check import check

    ctx = open_context()
    came = await use_case.wait(ctx, job_id, until, seconds)  # type: ignore[arg-type]  # click.Choice checked it
    found = await check(ctx, job_id, limit=0)
    reply = results.checked(found, ctx.hidden(found.texts, found.job.spec.secrets))
    if not came and found.job.state not in TERMINAL_JOBS:
        message = f"The job did not end within {seconds:g} s." if until == "end" else f"No news within {seconds:g} s."
        reply = reply.model_copy(update={"ok": False, "code": "unknown", "message": message})
    return answer(warned(reply, ctx), as_json, "checked")
