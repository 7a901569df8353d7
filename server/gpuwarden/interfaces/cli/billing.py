"""Commands for billing and teardown: teardown, approve, hold, instances, offers, watch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.interfaces.cli.base import JSON, VERBS, answer, cli, open_context, runs_async, warned, without_secrets

if TYPE_CHECKING:
    from gpuwarden.interfaces.results import Result
    from gpuwarden.lifecycle.monitoring.watch import Round


@cli.command()
@click.argument("job_id")
@click.option("--verb", type=VERBS, default="terminate", show_default=True, help="How to tear down the machine.")
@click.option("--withdraw", is_flag=True, help="Withdraw an open request.")
@JSON
@runs_async
async def teardown(job_id: str, verb: str, withdraw: bool, as_json: bool) -> int:
    """Request the teardown of a job's machine.

    The request is refused until every file that would be lost has been copied and proven. Then the user runs `gpuwarden
    approve TICKET`.
    """
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli.approval import user
    from gpuwarden.lifecycle.teardown import gate as use_case
    from gpuwarden.lifecycle.teardown.orders import hold_machine

    ctx = open_context()
    view = await use_case.request(ctx, job_id, verb)  # type: ignore[arg-type]  # click.Choice checked it
    if withdraw:
        hold_machine(ctx, job_id, "withdrawn request", user())
        await use_case.withdraw(ctx, view.record.id, "withdrawn on the command line")
        view = await use_case.proceed(ctx, view.record.id)
    return answer(warned(results.torn_down(view), ctx), as_json, "torn_down")


@cli.command()
@click.argument("ticket", required=False)
@click.option(
    "--code",
    default=None,
    metavar="PAGE",
    help="Show a one-time code to type on the approval web page, which displays the value of PAGE.",
)
@click.option("--set-pin", is_flag=True, help="Choose a PIN, which every approval at a terminal then requires.")
@click.option("--without-proof", is_flag=True, help="Accept losing unverified files; you have to type the job's name.")
@click.option(
    "--auto-teardown",
    type=VERBS,
    default=None,
    help="For a receipt (r...): tear down this job's machine without asking again, once all outputs are proven.",
)
@click.option(
    "--relaunch-budget",
    type=click.FloatRange(min=0, min_open=True, max=1_000_000),
    default=None,
    metavar="USD",
    help="For a receipt (r...): rent replacement machines for this job if its machine is reclaimed, up to this total.",
)
@JSON
@runs_async
async def approve(
    ticket: str | None,
    code: str | None,
    set_pin: bool,
    without_proof: bool,
    auto_teardown: Any,
    relaunch_budget: float | None,
    as_json: bool,
) -> int:
    """Approve a teardown, spending or a rehearsal. Without a ticket, list the open requests.

    The tickets are t... for a teardown, r... for spending and s... for a rehearsal. The command asks the user at a
    terminal; no flag or variable replaces the answer.
    """
    from gpuwarden.config import load_config
    from gpuwarden.interfaces.cli import approval
    from gpuwarden.interfaces.cli.doctor import other_servers
    from gpuwarden.interfaces.cli.page_code import show_code

    if set_pin:
        return answer(await approval.choose_pin(open_context()), as_json, "message")
    if not ticket:
        from gpuwarden.interfaces import results
        from gpuwarden.lifecycle.monitoring.waiting import what_waits

        reply: Result = results.waits(what_waits(open_context()))
        elsewhere = " ".join([reply.message, *other_servers(load_config())])
        return answer(reply.model_copy(update={"message": elsewhere}), as_json, "waits")
    ctx = open_context()
    decided = approval.ApprovalDecisions(auto_teardown, relaunch_budget)
    try:
        if code is not None:
            if without_proof or decided != approval.NOTHING:
                raise BadRequest("--code can't be combined with other decisions", "Leave --code out.")
            return answer(await show_code(ctx, ticket, code), as_json, "message")
        reply = await approval.on_terminal(ctx, ticket, without_proof=without_proof, decided=decided)
    except NotFound as error:
        raise NotFound(error.message, (*other_servers(load_config()), *error.next_steps)) from error
    return answer(reply, as_json, "message")


@cli.command()
@click.argument("job_id")
@JSON
@runs_async
async def hold(job_id: str, as_json: bool) -> int:
    """Cancel the automatic teardown and self-stop of a machine.

    The reply shows whether the machine is held or the request came too late.
    """
    from gpuwarden.interfaces.cli import approval
    from gpuwarden.lifecycle.leases.self_stop import hold as cancel_self_stop
    from gpuwarden.lifecycle.teardown.orders import hold_machine

    ctx = open_context()
    effect = hold_machine(ctx, job_id, "command line", approval.user())
    await cancel_self_stop(ctx, job_id)  # may raise if the machine does not answer; the hold is already recorded
    return answer(approval.held(job_id, effect), as_json, "message")


@cli.command()
@JSON
@runs_async
async def instances(as_json: bool) -> int:
    """List every rented machine: state, billing, cost, job."""
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.monitoring.inventory import list_instances

    ctx = open_context()
    return answer(warned(results.listed(await list_instances(ctx)), ctx), as_json, "listed")


@cli.command()
@click.option("--gpu", required=True, metavar="NAME", help="GPU model, such as H100 or L40S.")
@click.option("--gpus", "count", type=click.IntRange(1, 64), default=1, show_default=True, help="Number of GPUs.")
@click.option("--interruptible", is_flag=True, help="Cheaper machines that the platform may reclaim.")
@click.option("--durable-storage", is_flag=True, help="Only offers with storage that survives teardown.")
@click.option("--platform", "platforms", multiple=True, metavar="NAME", help="Only this platform; can be repeated.")
@JSON
@runs_async
async def offers(
    gpu: str, count: int, interruptible: bool, durable_storage: bool, platforms: tuple[str, ...], as_json: bool
) -> int:
    """Compare a GPU's price on every configured platform.

    The list shows the price, the capacity and the storage that survives a stop, cheapest platform first. The capacity
    of a platform that does not answer is unknown. Nothing is rented or reserved.
    """
    from gpuwarden.core.models import Resources
    from gpuwarden.interfaces import results
    from gpuwarden.lifecycle.offers import offers as use_case

    wanted = Resources(gpu=gpu, gpu_count=count, interruptible=interruptible, durable_storage=durable_storage)
    return answer(results.offered(await use_case(open_context(), wanted, platforms)), as_json, "offered")


@cli.command()
@click.option("--once", is_flag=True, help="Run one round; the exit code is 1 while an alert is open.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(1, 3600),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="Interval between rounds.",
)
@click.option("--install", is_flag=True, help="Install the watch as a service for this account.")
@click.option("--uninstall", is_flag=True, help="Remove that service.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path),
    default=None,
    help="A private file with API keys, one NAME=VALUE per line.",
)
@click.option("--beside", type=int, hidden=True, help="The process id of the server that starts the watch.")
@JSON
@runs_async
async def watch(
    once: bool, every_s: float, install: bool, uninstall: bool, keys: Path | None, beside: int | None, as_json: bool
) -> int:
    """Advance every job, and alert the user to problems.

    The watch raises an alert for an idle GPU, a stall, a failure, a finished job whose machine is still billed, and a
    cap that has been reached. It copies and proves jobs' outputs. It tears down a machine only by automatic
    teardown, which the user has to allow in advance. Alerts are recorded in the ledger and sent to the channels in the
    policy's [watch] table.
    """
    import anyio

    from gpuwarden.core.task_groups import first_error
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.cli.wording import in_commands
    from gpuwarden.interfaces.http.record import replaced
    from gpuwarden.lifecycle.monitoring.watch import Watcher

    if install or uninstall:
        from gpuwarden.config import load_config
        from gpuwarden.interfaces.cli import watch_service

        usual = load_config().policy_file.parent / watch_service.KEYS
        done = watch_service.uninstall() if uninstall else watch_service.install((keys or usual).absolute())
        return answer(done, as_json, "message")
    if keys is not None:
        from gpuwarden.interfaces.cli.watch_service import read_keys

        for name, value in read_keys(keys).items():
            os.environ.setdefault(name, value)
    if as_json and not once:
        raise BadRequest("--json prints one object, but a watch never ends", "Use --once --json, or leave --json out.")
    ctx = open_context("watch")
    watcher = Watcher(ctx, every_s)
    if once:
        return answer(warned(results.watched(await watcher.once()), ctx), as_json, "watch_round")
    first = warned(results.watched(await (watcher.round() if watcher.leads() else watcher.follow())), ctx)
    console.warnings(first)
    console.watch_round(results.worded(first, in_commands))
    before = first.unknown

    def show(done: Round) -> None:
        nonlocal before
        reply = results.watched(done)
        before, reply.unknown = reply.unknown, {k: v for k, v in reply.unknown.items() if before.get(k) != v}
        console.watched(results.worded(reply, in_commands))

    if not console.out.is_terminal:
        with first_error():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watcher.run, show)
                if beside is not None:
                    await replaced(ctx.home, beside)
                    tasks.cancel_scope.cancel()
        return 0
    from gpuwarden.interfaces.cli.screen import live_overview

    with live_overview(ctx, without_secrets) as redraw:  # alerts are printed above the overview

        def tell_and_redraw(done: Round) -> None:
            show(done)
            redraw(done.trouble)

        await watcher.run(tell_and_redraw)
    return 0
