"""Show and change the user's notes, and check them against the known platforms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from gpuwarden.core.errors import BadRequest, NotFound, WardenError
from gpuwarden.core.plural import counted
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import Result
from gpuwarden.lifecycle.context import Context
from gpuwarden.notes import Notes, change, load_notes


class NotesReply(Result):
    """The notes and their file."""

    path: str
    notes: dict[str, Any] = Field(default_factory=dict)


def show(ctx: Context) -> NotesReply:
    """Return the notes. Raises BadRequest if they can't be read."""
    file = _file(ctx)
    notes = load_notes(file)
    wrong = complaints(ctx, notes)
    message = " ".join(wrong) if wrong else "" if notes != Notes() else "The notes are empty."
    hint = "" if notes != Notes() else "For example: gpuwarden notes set tracker.name wandb"
    body = notes.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return NotesReply(path=str(file), notes=body, message=message, hint=hint)


def note(ctx: Context, key: str, value: str | None) -> NotesReply:
    """Set one note, or remove it if `value` is None. Raises BadRequest and changes nothing if the note is invalid."""
    file = _file(ctx)

    def refuse_wrong(new: Notes) -> None:
        if wrong := complaints(ctx, new):
            raise BadRequest(" ".join(wrong), "Nothing was changed.")

    change(file, key, value, refuse_wrong)
    return show(ctx)


def complaints(ctx: Context, notes: Notes) -> list[str]:
    """Return one sentence for each note that names an unknown platform or has no effect."""
    found = []
    for name, notes_here in notes.platforms.items():
        try:
            # `ssh` without a name applies to every SSH machine.
            profile = ctx.profile(name) if "/" in name else ctx.family(name)
        except NotFound:
            found.append(f"platforms.{name}: unknown platform; gpuwarden profiles lists the known ones.")
            continue
        if (notes_here.host or notes_here.scratch) and profile.meter.metered:
            found.append(f"platforms.{name}: host and scratch apply only to machines that you own; {name} is rented.")
        elif notes_here.host and (profile.backend == "local" or profile.id == "ssh"):
            found.append(
                f"platforms.{name}: host has no effect; the host is this machine or part of the platform's name."
            )
    return found


def summary(ctx: Context) -> tuple[bool, str]:
    """Return whether the notes are valid, and a description, for `gpuwarden doctor`."""
    file = ctx.notes_file
    if file is None or not file.exists():
        return True, "none; create them with gpuwarden notes set KEY VALUE"
    try:
        notes = load_notes(file)
    except WardenError as error:
        return False, f"{error.message} {in_commands(error.next_steps)}"
    wrong = complaints(ctx, notes)
    return not wrong, " ".join(wrong) or f"{file}, {counted(len(notes.platforms), 'platform')}"


def _file(ctx: Context) -> Path:
    if ctx.notes_file is None:
        raise BadRequest("the notes file's path is unknown", "Set GPUWARDEN_POLICY or a home folder.")
    return ctx.notes_file
