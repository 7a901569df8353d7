"""The command for many runs of one script: a grid, a random draw or a search, over several machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import is_fan_out
from gpuwarden.interfaces.cli.base import JSON, VERBS, answer, cli, open_context, runs_async, warned
from gpuwarden.interfaces.cli.script_words import RunsProgram, read_script_file

if TYPE_CHECKING:
    from gpuwarden.core.fan_out import FanOutPlan
    from gpuwarden.lifecycle.context import Context
    from gpuwarden.lifecycle.fan_out.limits import LimitIncrease

FOLLOW_S: Final = 5.0


@cli.command("fan-out", cls=RunsProgram)
@click.argument("what", nargs=-1, required=True)
@click.option("--on", "platform", default=None, help="Platform; see `gpuwarden profiles`.")
@click.option("--grid", "axes", multiple=True, metavar="NAME=A,B", help="An axis of the grid; can be repeated.")
@click.option("--seeds", type=click.IntRange(0, 1_000), default=0, help="Run each configuration with seeds 0 to N - 1.")
@click.option(
    "--random", "draws", multiple=True, metavar="NAME=LOW..HIGH", help="Draw random settings, --trials times."
)
@click.option(
    "--tune", "tuned", multiple=True, metavar="NAME=LOW..HIGH", help="Let Optuna choose settings, --trials times."
)
@click.option(
    "--trials",
    type=click.IntRange(1, 1_000),
    default=20,
    show_default=True,
    help="Number of random or tuned configurations.",
)
@click.option("--maximize", is_flag=True, help="Maximize the objective instead of minimizing it.")
@click.option("--weigh", default="", metavar="NAME", help="Assume that a cell's cost is proportional to this setting.")
@click.option(
    "--max-machines",
    type=click.IntRange(1, 256),
    default=None,
    help="Maximum number of simultaneous machines; default: 1.",
)
@click.option("--max-cost", "max_cost_usd", type=float, metavar="USD", help="Total budget; no launch exceeds it.")
@click.option("--tries", type=click.IntRange(1, 20), default=3, show_default=True, help="Attempts per cell.")
@click.option("--name", default=None, help="Short name; default: the script's name.")
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", help="A plain variable, never a secret.")
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A variable to pass as a secret.")
@click.option("--input", "inputs", multiple=True, metavar="PATH", help="A file or folder to upload.")
@click.option(
    "--output", "outputs", multiple=True, metavar="PATH", help="An output of each cell, in the cell's folder."
)
@click.option("--timeout", "timeout_s", type=int, metavar="SECONDS", help="Hard time limit per cell.")
@click.option("--estimate", "estimate_s", type=int, metavar="SECONDS", help="Expected time per cell.")
@click.option("--gpu", default=None, help="GPU name.")
@click.option("--gpus", "gpu_count", type=int, default=1, show_default=True, help="GPUs per machine; each runs a cell.")
@click.option("--interruptible", is_flag=True, help="Use cheaper, interruptible machines.")
@click.option("--teardown", type=VERBS, default="terminate", show_default=True, help="How to tear down the machines.")
@click.option("--dry-run", is_flag=True, help="Check the fan-out without launching it.")
@click.option("--receipt", default=None, help="Receipt from a dry run, to launch exactly that plan.")
@click.option("--follow", is_flag=True, help="Advance the fan-out until it is done.")
@click.option("--end", is_flag=True, help="With an id: launch no more cells. Running cells continue.")
@click.option("--resume", is_flag=True, help="With an id: resume the fan-out, with new limits if given.")
@click.option("--cells", default="", metavar="0,3,7-9", help="With --resume: only the cells with these indices.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), default=None, help="With an id: write an SVG plot."
)
@JSON
@runs_async
async def fan_out(
    what: tuple[str, ...],
    as_json: bool,
    follow: bool,
    end: bool,
    resume: bool,
    cells: str,
    plot: Path | None,
    **given: Any,
) -> int:
    """Run a script many times, and verify the outputs of every run.

    WHAT is a script.py with its arguments, or the id of a fan-out (f...) to show and advance. Options after
    a script are passed to it if it declares them.
    """
    from gpuwarden.interfaces import results
    from gpuwarden.interfaces.cli.approval import user
    from gpuwarden.lifecycle.fan_out.accepting import fan_out as use_case
    from gpuwarden.lifecycle.fan_out.deciding import end_fan_out
    from gpuwarden.lifecycle.fan_out.launching import advance_fan_out
    from gpuwarden.lifecycle.submission.inputs import below

    dry_run, receipt = given.pop("dry_run"), given.pop("receipt")
    if (end and resume) or (cells and not resume):
        raise BadRequest("--end can't be combined with --resume, and --cells needs --resume")
    ctx = open_context()
    if is_fan_out(what[0]):
        if dry_run or (not resume and (receipt or given["max_cost_usd"] or given["max_machines"])):
            raise BadRequest("an existing fan-out accepts limits and a receipt only with --resume, and never --dry-run")
        limits = {"max_cost_usd": given["max_cost_usd"], "max_machines": given["max_machines"], "receipt": receipt}
        rise = await _resumed(ctx, what[0], _indices(cells), limits) if resume else None
        if end:
            end_fan_out(ctx, what[0], user())
        found = replace(await advance_fan_out(ctx, what[0]), rise=rise)
    elif end or plot or resume:
        raise BadRequest("--end, --resume and --plot need an existing fan-out", "Pass its id instead of a script.")
    else:
        file = below(ctx.cwd or Path.cwd(), Path(what[0]))
        found = await use_case(ctx, _plan(what, given), dry_run=dry_run, receipt=receipt, script_file=file)
    while (
        follow and found.rise is None and found.now and not found.now.over and not (found.held and not found.now.live)
    ):
        await ctx.clock.sleep(FOLLOW_S)
        found = await advance_fan_out(ctx, found.now.fan.id)
    if plot is not None and found.now is not None:
        from anyio import Path as AsyncPath

        from gpuwarden.lifecycle.fan_out.summary import plot as drawing
        from gpuwarden.lifecycle.fan_out.summary import spreads

        try:
            await AsyncPath(plot).write_text(drawing(spreads(found.now.fan), found.plan.base.name), "utf-8")
        except (OSError, ValueError) as error:
            raise BadRequest(
                f"the plot can't be written: {error}", "Try again after some cells have been verified."
            ) from error
    return answer(warned(results.fanned_out(found), ctx), as_json, "fanned_out")


async def _resumed(ctx: Context, fan_id: str, cells: list[int], limits: dict[str, Any]) -> LimitIncrease | None:
    """Set new limits for a fan-out and resume it.

    Higher limits need a receipt. Without one, return the increase with a new receipt, and don't resume.
    """
    from gpuwarden.interfaces.cli.approval import user
    from gpuwarden.lifecycle.fan_out.deciding import resume_fan_out
    from gpuwarden.lifecycle.fan_out.limits import change_limits

    rise = await change_limits(ctx, fan_id, user(), **limits) if any(limits.values()) else None
    if rise is None:
        resume_fan_out(ctx, fan_id, user(), cells)
    return rise


def _indices(text: str) -> list[int]:
    """Return the indices in a list such as `0,3,7-9`. Raises BadRequest for anything else."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, between, high = part.partition("-")
        if not (low.isdecimal() and (high.isdecimal() or not between)) or max(map(len, (low, high))) > 4:
            raise BadRequest(f"{part!r} is not an index or a range such as 7-9")
        found += range(int(low), int(high or low) + 1)
    return found


def _plan(what: tuple[str, ...], given: dict[str, Any]) -> FanOutPlan:
    """Return the plan that the options describe. Raises BadRequest if the plan is impossible or contradictory."""
    from gpuwarden.core.fan_out import FanOutPlan, Search, drawn, first_problem, grid, gridded, plan_of
    from gpuwarden.core.inputs import build
    from gpuwarden.core.models import JobSpec

    program, *args = what
    axes, draws, tuned = (_pairs(given.pop(name)) for name in ("axes", "draws", "tuned"))
    if not program.endswith(".py") or given["platform"] is None:
        raise BadRequest("a fan-out needs a script.py and a platform", "Pass the script, and --on PLATFORM.")
    if sum(map(bool, (axes, draws, tuned))) > 1 or not (axes or draws or tuned or given["seeds"]):
        raise BadRequest("a fan-out needs exactly one of --grid, --random and --tune, or --seeds alone")
    ours = {name: given.pop(name) for name in ("seeds", "trials", "maximize", "weigh", "max_machines", "tries")}
    budget = given["max_cost_usd"]
    env = _pairs(given.pop("envs"))
    spec = {k: v for k, v in given.items() if v is not None}
    spec |= {"script": read_script_file(Path(program)), "args": args, "env": env}
    base = build(JobSpec, spec | {"name": given["name"] or Path(program).stem[:40]})
    limits = {"max_machines": ours["max_machines"] or 1, "max_cost_usd": budget, "max_tries": ours["tries"]}
    limits |= {"weigh": ours["weigh"]}
    try:
        if tuned:
            search = Search(space=tuned, trials=ours["trials"], maximize=ours["maximize"])
            return build(FanOutPlan, {"base": base, "search": search, **limits})
        if draws:
            chosen = [s | e for s in drawn(draws, ours["trials"], 0) for e in grid({}, ours["seeds"])]
            return plan_of(base, chosen, **limits)
    except ValueError as error:
        raise BadRequest(f"the plan is invalid: {first_problem(error)}") from error
    return gridded(base, {name: text.split(",") for name, text in axes.items()}, ours["seeds"], **limits)


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    """Parse NAME=VALUE words. Raises BadRequest for a repeated name or a word without `=`."""
    found: dict[str, str] = {}
    for name, mark, text in (word.partition("=") for word in words):
        if not mark or name in found:
            raise BadRequest(f"{name} must be given as NAME=VALUE, exactly once")
        found[name] = text
    return found
