"""The command that estimates memory and time before a machine is rented."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context, runs_async
from gpuwarden.interfaces.cli.script_words import RunsScript

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.estimate import EstimateReply

_WIDTH = 40
_COLORS = {"fits": "green", "may_fit": "yellow", "will_not_fit": "red"}


@cli.command(cls=RunsScript)
@click.argument("what", nargs=-1, required=True)
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="GPU, such as a100, l4 or h100x8; can be repeated.")
@click.option(
    "--method", type=click.Choice(["full", "lora", "qlora"]), help="Training method, instead of the script's."
)
@click.option("--batch-size", "batch", type=click.IntRange(1), help="Batch size on one GPU, in rows.")
@click.option("--max-length", "length", type=click.IntRange(1), help="Maximum tokens per row.")
@click.option("--checkpointing/--no-checkpointing", default=None, help="Whether activations are recomputed.")
@click.option(
    "--packed/--padded", "packed", default=None, help="Whether all rows have the maximum length, as with packing."
)
@click.option("--rank", type=click.IntRange(1), help="Adapter rank.")
@click.option("--optim", "optimizer", metavar="NAME", help="Optimizer, such as adamw or paged_adamw_8bit.")
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage; 3 is the same as full sharding with FSDP.")
@click.option("--steps", "max_steps", type=click.IntRange(1), help="Number of optimizer steps, to estimate the time.")
@JSON
@runs_async
async def estimate(what: tuple[str, ...], gpus: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Estimate a run's memory and time, without a GPU.

    WHAT is a script.py with its arguments, a model's id on the Hub, or a folder with a config.json. Options before a
    script override the script's settings; options after the script are passed to it if it declares them. Exit code 1:
    the run does not fit on any of the named GPUs.
    """
    from gpuwarden.interfaces.results.estimate import estimated
    from gpuwarden.lifecycle.submission.estimating import estimate as use_case
    from gpuwarden.static_analysis.estimate.setup import fused_of, optimizer_of

    settings = {name: value for name, value in given.items() if value is not None}
    if "optimizer" in settings:
        settings["fused"] = fused_of(settings["optimizer"])
        settings["optimizer"], settings["layerwise"] = optimizer_of(settings["optimizer"])
    if "packed" in settings:
        settings["padded"] = not settings.pop("packed")
    found = await use_case(open_context(), what[0], what[1:], gpus, settings)
    reply = estimated(found)
    if not as_json:
        _show(reply)
    code = answer(reply, as_json, "message")
    return 1 if gpus and all(card.fit == "will_not_fit" for card in reply.cards) else code


def _show(reply: EstimateReply) -> None:
    """Print the memory range, a bar for each part of it, and one line for each GPU."""
    from rich.table import Table

    from gpuwarden.interfaces.cli.console import out, shown
    from gpuwarden.interfaces.cli.drawing import span

    out.print(
        f"{shown(reply.model)}, {reply.parameters / 1e9:.3g}B parameters, {reply.method}: "
        f"[bold]{reply.low_gb:.3g} to {reply.high_gb:.3g} GB[/] on one GPU, "
        f"{'traced' if reply.level == 'traced' else 'by formula'}"
    )
    most = max([*reply.parts_gb.values(), 0.01])
    bars = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, size in reply.parts_gb.items():
        bars.add_row(name, "\u2588" * round(_WIDTH * size / most) or "\u258f", f"{size:.2f} GB")
    out.print(bars)
    cards = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for card in reply.cards:
        filled, reach = (min(_WIDTH, round(_WIDTH * size / card.gb)) for size in (reply.low_gb, reply.high_gb))
        bar = "\u2588" * filled + "\u2592" * (reach - filled) + "\u00b7" * (_WIDTH - reach)
        time = f"{span(card.seconds[0])} to {span(card.seconds[1])}" if card.seconds else ""
        name = card.gpu if card.count == 1 else f"{card.count} x {card.gpu}"
        cards.add_row(name, f"[{_COLORS[card.fit]}]{bar}[/]", f"{card.gb} GB", card.fit.replace("_", " "), time)
    out.print(cards)
    out.print(f"[dim]{shown(reply.how)}[/]")
