"""The commands `audit export` and `audit check`, which export the ledger for an auditor and check an export."""

from __future__ import annotations

import contextlib
import json
import os
from itertools import chain
from pathlib import Path

import click

from gpuwarden.core.errors import BadRequest, Conflict, DiskError
from gpuwarden.interfaces.cli.base import JSON, answer, cli, open_context


@cli.group()
def audit() -> None:
    """Export the ledger for an auditor, and check an export."""


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--append", is_flag=True, help="Append the events recorded since the export in FILE.")
@JSON
def export(file: Path, append: bool, as_json: bool) -> int:
    """Write every event to FILE, one JSON object per line, each with its user, interface and hash."""
    from gpuwarden.core.plural import counted
    from gpuwarden.interfaces.results import Result
    from gpuwarden.ledger.export import check_lines, export_lines

    ctx, after, added = open_context(), 0, 0
    try:
        if append and file.exists():
            with file.open(encoding="utf-8") as before:
                last, broken = check_lines(before)
            if broken is not None or (last is not None and not ctx.ledger.has(last)):
                raise Conflict(f"{file} is not an export of this ledger, or was changed", "Export to another file.")
            after = last.seq if last else 0
        mode = os.O_APPEND if append else os.O_EXCL
        with (
            os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | mode, 0o600), "w", encoding="utf-8") as out,
            ctx.ledger.snapshot() as query,
        ):
            for text in export_lines(query, after):
                out.write(f"{text}\n")
                added += 1
            out.flush()
            with contextlib.suppress(OSError):  # a pipe can't be synced to disk
                os.fsync(out.fileno())
    except FileExistsError as error:
        raise BadRequest(f"{file} exists", "Choose another name, or append to it with --append.") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"{file} is not an export") from error
    except OSError as error:
        raise DiskError.of(error) from error
    return answer(Result(message=f"{counted(added, 'event')} written to {file}."), as_json, "message")


@audit.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@JSON
def check(file: Path, as_json: bool) -> int:
    """Check an export's hash chain, without the ledger."""
    from gpuwarden.interfaces.results import Result
    from gpuwarden.ledger.export import check_lines

    try:
        with file.open(encoding="utf-8") as lines:
            opening = next(lines, None)
            last, broken = check_lines(chain(filter(None, [opening]), lines))
    except UnicodeDecodeError as error:
        raise BadRequest(f"{file} is not an export") from error
    if broken is not None:
        text = f"{file} was changed: event {broken.seq} is {broken.code}."
        hint = "Export the ledger again, and check it with gpuwarden doctor --ledger."
        return answer(Result(ok=False, code="broken", message=text, hint=hint), as_json, "message")
    if (
        opening and last and (first := json.loads(opening)["seq"]) != 1
    ):  # without the events before it, the first line can't be verified
        text = f"{file} begins with event {first}: earlier events are missing, and that event can't be verified. "
        text += f"Events {first + 1} to {last.seq}, hash {last.hash}, are unchanged."
        hint = "Prepend the earlier part of the export, then check both together."
        return answer(Result(ok=False, code="incomplete", message=text, hint=hint), as_json, "message")
    text = f"{file} is intact up to event {last.seq}, hash {last.hash}." if last else f"{file} contains no events."
    return answer(Result(message=text), as_json, "message")
