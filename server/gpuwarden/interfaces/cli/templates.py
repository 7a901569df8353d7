"""Commands for the bundled training scripts: list, show and write them, and convert rows for them."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuwarden.core.errors import BadRequest, DiskError
from gpuwarden.interfaces.cli.base import JSON, answer, cli, emit, open_context, runs_async, without_secrets

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.templates import ConvertedReply, FilledReply

PRACTICE = "rehearsal/runpod"
"""The platform in the printed command if the user does not name one: a rehearsal, which costs nothing."""
GUESS_S = 4 * 3600


@cli.group()
def template() -> None:
    """Use a bundled training script, and convert rows for it."""


@template.command(name="list")
@JSON
def list_templates(as_json: bool) -> int:
    """List the templates, and the rows that each template reads."""
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.results.templates import templates_listed

    reply = templates_listed()
    if as_json:
        emit(reply.model_dump(mode="json"))
        return 0
    for found in reply.templates:
        also = f" [dim](also: {', '.join(found.also_called)})[/]" if found.also_called else ""
        console.out.print(f"[bold]{found.name}[/]{also}  {console.shown(found.title)}")
        console.out.print(f"  [dim]rows: {console.shown(' or '.join(found.rows) or 'none')}[/]")
    return 0


@template.command()
@click.argument("name")
@JSON
def show(name: str, as_json: bool) -> int:
    """Show one template: its purpose, rows and settings."""
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.results.templates import template_shown
    from gpuwarden.static_analysis.shipped_trainers import ALIASES, trainer

    reply = template_shown(trainer(name))
    if as_json:
        emit(reply.model_dump(mode="json"))
        return 0
    if name.lower() in ALIASES:
        console.out.print(f"[yellow]{console.shown(ALIASES[name.lower()][1])}[/]\n")
    console.out.print(console.shown(reply.about) + "\n")
    for setting in reply.settings:
        choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
        default = "" if setting.default == "" else f" [dim]\\[{console.shown(str(setting.default))}][/]"
        console.out.print(f"  {setting.flag}  {console.shown(setting.about + choices)}{default}")
    return 0


@template.command()
@click.argument("name")
@click.option("--model", default="", help="Hub id or folder.")
@click.option("--dataset", default="", help="Hub id, file or folder.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting (see `template show NAME`).")
@click.option("--platform", default="", help="Platform to run on; see `gpuwarden profiles`.")
@click.option("--push", default="", metavar="OWNER/NAME", help="Hub repo for the results.")
@click.option("--gpu", default=None, help="GPU name.")
@click.option("--timeout", "timeout_s", type=int, default=None, metavar="SECONDS", help="Hard time limit for the job.")
@click.option(
    "--out",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="File to write; default: NAME.py.",
)
@click.option("--bundle", is_flag=True, help="Write one file that includes its package.")
@JSON
@runs_async
async def write(
    name: str, model: str, dataset: str, settings: tuple[str, ...], platform: str, push: str, file: Path | None,
    bundle: bool, as_json: bool, **more: Any,
) -> int:  # fmt: skip
    """Write a template's script, and the command that submits it.

    The script's package, gputrain, is written next to the script; `gpuwarden submit` adds the package to the script.
    If a model and a dataset are given, both are inspected, and the config, the split, the column names and the chat
    template are set accordingly.
    """
    from gpuwarden.hub.client import HubConfig
    from gpuwarden.interfaces.results.templates import filled_reply
    from gpuwarden.lifecycle.templates.fill import TemplateRequest, fill
    from gpuwarden.lifecycle.templates.sizing import sized
    from gpuwarden.static_analysis.shipped_trainers import trainer

    pairs = {key: value for key, _, value in (text.partition("=") for text in settings)}
    if not all(pairs.values()):
        raise BadRequest("--set takes NAME=VALUE", "See `gpuwarden template show NAME`.")
    ctx = open_context()
    target = file or Path(f"{trainer(name).name}.py")
    refuse_to_overwrite(target)
    profile = ctx.profile(platform) if platform else None
    request = TemplateRequest(
        name, model, dataset, {key.replace("-", "_"): value for key, value in pairs.items()}, push
    )
    filled = await fill(request, HubConfig.from_env(ctx.env), clock=ctx.clock, profile=profile, here=Path.cwd())
    try:
        if not bundle:
            write_package(target.parent)
        with target.open("x", encoding="utf-8", newline="") as stream:
            stream.write(filled.trainer.text if bundle else filled.trainer.source)
        target.chmod(0o755)
    except FileExistsError:
        refuse_to_overwrite(target)
    except OSError as error:
        raise DiskError.of(error) from error
    more["gpu"], estimated = await sized(ctx, str(target), filled.args, platform, more["gpu"])
    more["timeout_s"] = more["timeout_s"] or estimated
    reply = filled_reply(filled, platform, str(target), {**more, "timeout_s": more["timeout_s"] or GUESS_S})
    reply.submit["script"] = str(target)
    if not more["timeout_s"]:
        reply.message = f"{reply.message} The time can't be estimated: --timeout {GUESS_S} is a guess.".strip()
    if as_json:
        return answer(reply, as_json, "message")
    print_filled(without_secrets(reply), bundle=bundle)
    return 0


def write_package(folder: Path) -> None:
    """Write the bundled scripts' package to a folder. Keep an existing package, which the user may have changed.

    Raises:
        BadRequest: a file with the package's name exists.

    """
    from gpuwarden.static_analysis.bundle import PACKAGE, shipped_files

    package = folder / PACKAGE
    if package.is_dir():
        return
    refuse_to_overwrite(package)
    with tempfile.TemporaryDirectory(prefix=f".{PACKAGE}-", dir=folder) as made:
        whole = Path(made) / PACKAGE
        whole.mkdir()
        for name, text in shipped_files().items():
            (whole / name).write_text(text, encoding="utf-8", newline="")
        whole.rename(package)


def refuse_to_overwrite(file: Path) -> None:
    """Raise BadRequest if a file exists."""
    if file.exists() or file.is_symlink():
        raise BadRequest(f"{file} exists; nothing was written", "Pass --out with another name, or move that file.")


def print_filled(reply: FilledReply, *, bundle: bool) -> None:
    """Print the file's name, the facts about the model and dataset, and the command that submits the file."""
    from gpuwarden.interfaces.cli import console
    from gpuwarden.interfaces.cli.wording import option

    out, shown = console.out, console.shown
    if reply.explained:
        out.print(f"[yellow]{shown(reply.explained)}[/]")
    package = "including its package" if bundle else "with its package in the folder gputrain next to it"
    out.print(f"wrote [bold]{shown(reply.file)}[/], the bundled {reply.template}.py, {package}")
    for repo in filter(None, (reply.model, reply.dataset)):
        out.print(f"{shown(repo.id)}: {repo.access}, license {shown(repo.license)}")
    if reply.reads:
        out.print(f"rows: {', '.join(reply.reads)}")
    given = {"platform": PRACTICE, **reply.submit}
    words = ["gpuwarden", "submit"]
    for name in ("platform", "gpu", "timeout_s", "inputs", "outputs", "secrets"):
        values = given.get(name, [])
        for value in values if isinstance(values, list) else [values]:
            words += [option(name), str(value)]
    words += ["--durable-storage"] if given.get("durable_storage") else []
    # The job's options come first, because all words after the script are passed to the script.
    words += ["--", str(given["script"]), *given.get("args", [])]
    out.print(f"\n{shown(shlex.join(words))}", soft_wrap=True)
    if reply.message:
        out.print(f"\n[yellow]{shown(reply.message)}[/]")


@template.command()
@click.argument("name")
@click.argument("source")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--columns", default="", metavar="OLD=NEW,...", help="Rename columns first.")
@click.option("--config", default="default", show_default=True, help="Config of a Hub dataset.")
@click.option("--split", default="train", show_default=True, help="Split of a Hub dataset.")
@click.option(
    "--rows", type=click.IntRange(1, 100_000), default=1_000, show_default=True, help="Rows to read from a Hub dataset."
)
@JSON
@runs_async
async def convert(
    name: str, source: str, file: Path | None, columns: str, config: str, split: str, rows: int, as_json: bool
) -> int:
    """Convert rows into the form that the template NAME reads.

    SOURCE is a jsonl, json, csv, tsv or parquet file, COCO annotations, a folder of images, or a Hub dataset's id.
    Recognized forms are ShareGPT, Alpaca, questions with answers, transcripts and preference pairs. Three rows are
    shown before and after the conversion. FILE is the new jsonl file; without FILE, nothing is written.
    """
    from gpuwarden.hub.client import HubClient, HubConfig
    from gpuwarden.interfaces.results.templates import converted_reply
    from gpuwarden.lifecycle.templates.convert import Conversion, convert, need_some, preview, write_rows
    from gpuwarden.lifecycle.templates.fill import requested_renames
    from gpuwarden.lifecycle.templates.rows import hub_rows, rows_of
    from gpuwarden.static_analysis.shipped_trainers import trainer

    found, done = trainer(name), Conversion()
    renames = requested_renames(columns)
    if file is not None:
        refuse_to_overwrite(file)
    read = rows_of(Path(source))
    if is_hub_id(Path(source)):
        async with HubClient(HubConfig.from_env()) as hub:
            most = rows if file is not None else 3
            read = iter([row async for row in hub_rows(hub, source, config, split, most)])
    made = convert(read, found, renames, done)
    if file is None:
        preview(made)
        need_some(done)
    else:
        write_rows(made, file, done)
    reply = converted_reply(done, found, str(file or ""))
    if as_json:
        return answer(reply, as_json, "message")
    print_converted(without_secrets(reply))
    return 0


def is_hub_id(source: Path) -> bool:
    """Return whether a source is a Hub dataset: owner/name, and not an existing local path."""
    return len(source.parts) == 2 and not source.is_absolute() and not source.suffix and not source.exists()


def print_converted(reply: ConvertedReply) -> None:
    """Print rows before and after the conversion, the rows that were left out, and the number of rows."""
    from gpuwarden.interfaces.cli import console

    for before, after in zip(reply.before, reply.after, strict=True):
        console.out.print(console.shown(before), soft_wrap=True)
        console.out.print(console.shown(after) + "\n", soft_wrap=True)
    for problem in reply.problems:
        console.out.print(f"[yellow]left out[/] {console.shown(problem)}")
    console.out.print(console.shown(reply.message))
