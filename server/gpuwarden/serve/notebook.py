"""The user's notes at the doors: shown, changed, and held against the platforms there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from gpuwarden.core.counts import counted
from gpuwarden.core.errors import BadRequest, NotFound, WardenError
from gpuwarden.core.profile import Profile
from gpuwarden.lifecycle.warden import SSH, Warden
from gpuwarden.notes import Notes, change, load_notes
from gpuwarden.serve.replies import Reply


class NotesReply(Reply):
    """The notes, and the file they stand in."""

    path: str
    notes: dict[str, Any] = Field(default_factory=dict)


def show(w: Warden) -> NotesReply:
    """What is noted. Raises BadRequest for notes that can't be read."""
    file = _file(w)
    notes = load_notes(file)
    wrong = complaints(w, notes)
    message = " ".join(wrong) if wrong else "" if notes != Notes() else "Nothing is noted yet."
    hint = "" if notes != Notes() else "Such as: gpuwarden notes set tracker.name wandb"
    body = notes.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return NotesReply(path=str(file), notes=body, message=message, hint=hint)


def note(w: Warden, key: str, value: str | None) -> NotesReply:
    """Set one note, or take it out. Raises BadRequest for what would not hold, and then nothing was changed."""
    file = _file(w)
    change(file, key, value, lambda new: _hold(w, new))
    return show(w)


def _hold(w: Warden, new: Notes) -> None:
    wrong = complaints(w, new)
    if wrong:
        raise BadRequest(" ".join(wrong), "Nothing was changed.")


def complaints(w: Warden, notes: Notes) -> list[str]:
    """What is noted of a platform that is none, or where it has no effect; one sentence each."""
    found = []
    for name, told in notes.platforms.items():
        profile = _profile(w, name)
        if profile is None:
            found.append(f"platforms.{name}: there is no such platform; gpuwarden profiles lists them.")
        elif (told.host or told.scratch) and profile.meter.metered:
            found.append(f"platforms.{name}: host and scratch are for machines of your own; {name} is rented.")
        elif told.host and (profile.backend == "local" or f"{profile.id}/" == SSH):
            found.append(f"platforms.{name}: host says nothing here: it is this machine, or the name's own alias.")
    return found


def _profile(w: Warden, name: str) -> Profile | None:
    """The profile that a name in the notes is about; `ssh` alone is about every machine behind SSH."""
    try:
        return w.profile(f"{name}/ALIAS" if f"{name}/" == SSH else name)
    except NotFound:
        return None


def summary(w: Warden) -> tuple[bool, str]:
    """For the doctor: whether the notes are in order, and what was found."""
    file = w.notes_file
    if file is None or not file.exists():
        return True, "none; gpuwarden notes set KEY VALUE begins them"
    try:
        notes = load_notes(file)
    except WardenError as error:
        return False, f"{error.message} {error.hint}"
    wrong = complaints(w, notes)
    return not wrong, " ".join(wrong) or f"{file}, {counted(len(notes.platforms), 'platform')}"


def _file(w: Warden) -> Path:
    if w.notes_file is None:
        raise BadRequest("there is no place for notes", "Set GPUWARDEN_POLICY, or a home folder.")
    return w.notes_file
