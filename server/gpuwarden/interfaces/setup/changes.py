"""Insert the server's entry into a client's configuration file, and remove the entry again.

Every insertion is recorded in the account's state folder. If the file has not changed since the insertion, undo
restores the file byte for byte. Otherwise undo removes only the entry, and only if the entry is unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomlkit

from gpuwarden.core.errors import Conflict
from gpuwarden.core.models import Frozen
from gpuwarden.interfaces.hooks.install import replace_text
from gpuwarden.interfaces.launch import NAME
from gpuwarden.interfaces.setup import jsonc
from gpuwarden.interfaces.setup.clients import ClientFile
from gpuwarden.private import private_folder, write_private
from gpuwarden.running_servers import folder

NOTE: Final = "setup.json"


class WrittenChange(Frozen):
    """A change that has been written to one client's file: its offset, its text, and the file's resulting digest.

    `made` is true if the file did not exist before. `folder_made` is true if its folder did not exist before; a
    leftover folder makes a client look installed. `guard` is true if setup also installed the guard.
    """

    file: str = ""
    at: int = 0
    text: str = ""
    after: str = ""
    made: bool = False
    folder_made: bool = False
    guard: bool = False


class SetupRecord(Frozen):
    """All changes that `gpuwarden setup` has written, keyed by client."""

    clients: dict[str, WrittenChange] = {}


@dataclass(frozen=True)
class Change:
    """A change that has not been written yet. `before` is None if the file does not exist."""

    client: ClientFile
    before: str | None
    at: int
    text: str

    @property
    def after(self) -> str:
        """Return the complete file's text after the change."""
        before = self.before or ""
        return before[: self.at] + self.text + before[self.at :]

    @property
    def line(self) -> int:
        """Return the number of the line after which the new lines are inserted."""
        return (self.before or "")[: self.at].count("\n")

    @property
    def written(self) -> WrittenChange:
        """Return the record of this change. The record is saved before the change is written."""
        file = self.client.file
        return WrittenChange(
            file=str(file), at=self.at, text=self.text, after=digest(self.after), made=self.before is None,
            folder_made=not file.parent.exists(),
        )  # fmt: skip

    @property
    def lines(self) -> str:
        """Return the lines that the user can paste into the file by hand."""
        return lines_of(self.client, _entry_in(self.client, self.text))

    def write(self) -> None:
        """Write the file atomically. Raises OSError, or Conflict if another program has changed the file."""
        if read(self.client.file) != self.before:
            raise Conflict(
                f"{self.client.file} was changed by another program; nothing was written", "Run gpuwarden setup again."
            )
        private_folder(self.client.file.parent)
        replace_text(self.client.file, self.after)


def planned(client: ClientFile, entry: dict[str, Any]) -> Change:
    """Return the change that adds the server's entry.

    Raises ValueError if an entry exists, or if adding one would change other parts of the file.
    """
    before = read(client.file)
    text = before or ""
    path = (client.key, NAME)
    expected = copy.deepcopy(client.parsed(text))
    servers = expected.setdefault(client.key, {})
    if not isinstance(servers, dict) or NAME in servers:
        raise ValueError(f"{client.key} has an unexpected structure, or already contains {NAME}")
    servers[NAME] = entry
    at, insert = (len(text), _toml_lines(text, path, entry)) if client.toml else jsonc.inserted(text, path, entry)
    change = Change(client, before, at, insert)
    if client.parsed(change.after) != expected:
        raise ValueError("the change would affect other parts of the file")
    return change


def undone(client: ClientFile, written: WrittenChange) -> str | None:
    """Return the file's text without the entry that setup wrote, or None if the file itself must be deleted.

    Raises KeyError if the entry is absent, and ValueError if it can't be removed.
    """
    text = read(client.file)
    if text is None:
        raise KeyError("the file no longer exists")
    expected = copy.deepcopy(client.parsed(text))
    servers = expected.get(client.key)
    entry = servers.pop(NAME, None) if isinstance(servers, dict) else None
    if entry is None:
        raise KeyError("the entry no longer exists")
    if entry != _entry_in(client, written.text):
        raise ValueError("the entry was changed after setup wrote it")
    expected.setdefault(client.key, {})
    exact = text[: written.at] + text[written.at + len(written.text) :]
    if digest(text) == written.after and client.parsed(exact) in (expected, _without_empty(client, expected)):
        return None if written.made and not exact else exact
    without = text.replace(written.text, "", 1) if client.toml else jsonc.removed(text, (client.key, NAME))
    if client.parsed(without) not in (expected, _without_empty(client, expected)):
        raise ValueError("the entry can't be removed without changing other parts of the file")
    return without


def _without_empty(client: ClientFile, table: dict[str, Any]) -> dict[str, Any]:
    """Return a file's table, without its list of servers if the list is empty."""
    return {key: value for key, value in table.items() if key != client.key or value}


def lines_of(client: ClientFile, entry: dict[str, Any]) -> str:
    """Return the lines that the user can paste into a client's file."""
    if client.toml:
        return _toml_lines("", (client.key, NAME), entry)
    return jsonc.inserted("", (client.key, NAME), entry)[1]


def read(file: Path) -> str | None:
    """Return a file's text; None if the file does not exist. Raises ValueError if the text is not UTF-8."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None


def digest(text: str) -> str:
    """Return the SHA-256 digest of a file's text, to detect changes."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_note() -> SetupRecord:
    """Return the record of all changes; empty if it is missing or can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return SetupRecord.model_validate_json((folder().parent / NOTE).read_bytes())
    return SetupRecord()


def write_note(note: SetupRecord) -> None:
    """Replace the record of all changes. Raises OSError."""
    write_private(private_folder(folder().parent) / NOTE, note.model_dump_json())


def _toml_lines(text: str, path: tuple[str, str], entry: dict[str, Any]) -> str:
    table = tomlkit.table()
    table.update(entry)
    for key, value in entry.items():
        if isinstance(value, list) and len(value) > 6:
            rows = tomlkit.array()
            rows.extend(value)
            table[key] = rows.multiline(multiline=True)
    outer = tomlkit.table(is_super_table=True)
    outer.add(path[1], table)
    document = tomlkit.document()
    document.add(path[0], outer)
    gap = "\n" * (2 - min(2, len(text) - len(text.rstrip("\n")))) if text.strip() else ""
    return gap + tomlkit.dumps(document)


def _entry_in(client: ClientFile, text: str) -> Any:
    """Return the server's entry from the inserted text."""
    if client.toml:
        return client.parsed(text)[client.key][NAME]
    body = text.strip().rstrip(",")
    table = jsonc.loads(body if body.startswith("{") else f"{{{body}}}")
    return table.get(client.key, table).get(NAME)
