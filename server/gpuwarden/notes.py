"""The user's notes on their own setup: one TOML file, `notes.toml`, next to the policy.

    facts = ["the lab's box is shared on Fridays"]

    server = "https://gw.example.org"   # address of `gpuwarden serve` that jobs send their metrics to, if reachable

    [tracker]
    name = "wandb"
    entity = "my-team"
    key = "$WANDB_API_KEY"        # where the key is stored: a variable or a file, never its value

    [usual]
    gpu = "A100"
    gpu_count = 1
    disk_gb = 100

    [platforms."ssh/lab-box"]     # your own machine
    scratch = "/data/me/runs"
    key = "~/.ssh/id_ed25519"
    note = "ask before you use both cards"

    [platforms.box]               # `box` is your own profile with the backend ssh
    host = "lab-box"              # an alias from ~/.ssh/config, or an address

Values that look like a secret are refused, and no message repeats a value.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import SECRET_NAME, TOKEN
from gpuwarden.frontmatter import Parsed, validate
from gpuwarden.private import private_folder, write_private

MAX_BYTES = 64 * 1024
Line = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/ -]{0,79}$")]
_HOME = re.compile(r"^(\$[A-Za-z_][A-Za-z0-9_]{0,63}|(~|\.{0,2})/[^\x00-\x1f\x7f]{1,250})$")
Home = Annotated[str, Field(pattern=_HOME.pattern)]
"""Where a key is stored: `$NAME` for a variable, or a path."""
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:%-]{0,254}$")]
Folder = Annotated[str, Field(pattern=r"^(~|/)[^\x00-\x1f\x7f]{0,250}$")]

# A long string of letters and digits that contains no word is treated as a key: old wandb keys are 40 hex
# digits, and many clouds issue keys of 32 letters.
_OPAQUE = re.compile(r"(?<![A-Za-z0-9+])(?=[A-Za-z+]*\d)(?=[0-9+]*[A-Za-z])[A-Za-z0-9+]{20,}={0,2}")
_TOLD = re.compile(r"(?i)\b(?:token|secret|password|passwd|api.?key)\s*(?:[=:]|is)\s*(?![$~/])\S+")
_IN_URL = re.compile(r"://[^/\s:@]+:[^/\s@]+@")
_HEADER = re.compile(r"\s*(\[[^\[\]]+\])\s*(?:#.*)?$")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'))*)\s*="""
)


# As in a job's spec; the part after the slash may be an address or an alias, so dots and capitals are allowed.
_PLATFORM = r"[a-z0-9][a-z0-9_-]{0,40}(/[A-Za-z0-9][A-Za-z0-9._-]{0,62})?"
_NOTE = re.compile(rf"(platforms)\.({_PLATFORM})\.([a-z0-9_-]+)|([a-z0-9_-]+)(?:\.([a-z0-9_-]+))?")


class Tracker(Frozen):
    """The user's experiment tracker."""

    name: Word
    entity: Word | None = None
    key: Home | None = None


class UsualMachine(Frozen):
    """The machine that the user usually rents. For information only, never a default for a submission."""

    gpu: Word | None = None
    gpu_count: Annotated[int, Field(ge=1, le=64)] | None = None
    disk_gb: Annotated[int, Field(ge=1, le=100_000)] | None = None


class PlatformNotes(Frozen):
    """The user's notes on one platform."""

    host: Host | None = None
    scratch: Folder | None = None
    key: Home | None = None
    note: Line | None = None


class Notes(Frozen):
    """The contents of the notes file."""

    facts: Annotated[tuple[Line, ...], Field(max_length=50)] = ()
    server: Annotated[str, Field(pattern=r"^https://[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?/?$")] | None = None
    tracker: Tracker | None = None
    usual: UsualMachine = UsualMachine()
    platforms: dict[Annotated[str, Field(pattern=rf"^{_PLATFORM}$")], PlatformNotes] = {}

    def of(self, platform: str) -> PlatformNotes:
        """Return the notes on a platform. For `ssh/ALIAS` without notes, return the notes on `ssh`, which apply to all
        aliases.
        """
        return self.platforms.get(platform) or self.platforms.get(platform.partition("/")[0]) or PlatformNotes()


def load_notes(file: Path) -> Notes:
    """Read the notes; empty if the file does not exist. Raises BadRequest with file and line, but no value."""
    text = _read(file)
    return Notes() if text is None else read_notes(text, str(file))


def read_notes(text: str, name: str) -> Notes:
    """Return the notes in `text`; `name` appears in errors."""
    try:
        table = _plain(tomllib.loads(text))
        strings = list(_strings(table))
    except (ValueError, RecursionError) as error:  # also raised for a number with thousands of digits
        found = re.search(r"at line (\d+)", str(error))
        line = found[1] if found else str(max(1, text.count("\n") + 1))
        raise BadRequest(f"{name}:{line}: this is not valid TOML", f"Correct {name}.") from None
    parsed = Parsed(table, {(): 1, **_lines(text)})
    for loc, value in strings:
        # A name such as `token` marks its value as a secret. The field `key` is exempt: it names where a key is stored.
        named = any(isinstance(step, str) and SECRET_NAME.search(step) for step in loc)
        if looks_secret(value) or (named and not _HOME.fullmatch(value)):
            raise BadRequest(
                f"{name}:{parsed.line_of(loc)}: this looks like a secret",
                f"Remove it from {name}, rotate it, and note only where it is stored: $NAME, or a path.",
            )
    return validate(Notes, parsed, name=name)


def change(file: Path, key: str, value: str | None, check: Callable[[Notes], None]) -> None:
    """Set the dotted `key` to `value`, or remove it if None. A fact is appended. The rest of the file stays unchanged.

    The new text is validated strictly and by `check` before it replaces the old one. Raises BadRequest, and leaves the
    file unchanged, if the new text is not valid.
    """
    import tomlkit

    text = _read(file) or ""
    if text:
        read_notes(text, str(file))
    document = tomlkit.parse(text)
    if key == "facts" and value is not None:
        document.setdefault("facts", tomlkit.array()).append(value)
    elif found := _NOTE.fullmatch(key):
        _put(document, [part for part in found.group(1, 2, 4, 5, 6) if part], value)
    else:
        raise BadRequest(f"{key[:80]!r} is not a valid key", "Use a key such as tracker.name or platforms.ssh.host.")
    new = tomlkit.dumps(document)
    try:
        notes = read_notes(new, "")
    except BadRequest as error:
        message = re.sub(r"^:\d+: ", "", error.message)
        raise BadRequest(
            f"{message}; nothing was changed", "Use a key such as tracker.name or platforms.ssh.host."
        ) from error
    check(notes)
    private_folder(file.parent)
    write_private(file.resolve(), new)


def _put(table: Any, path: list[str], value: str | None) -> None:
    """Set or delete the value at `path`. Delete tables that become empty."""
    import tomlkit

    step, *rest = path
    if value is None and step not in table:
        raise BadRequest(f"no note has the key {step[:80]!r}", do(Action.SHOW_NOTES))
    if not rest and value is not None:
        table[step] = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value
        return
    if rest:
        inner = table.setdefault(step, tomlkit.table())
        if not isinstance(inner, dict):
            raise BadRequest(f"{step[:80]!r} is not a valid key in the notes", do(Action.SHOW_NOTES))
        _put(inner, rest, value)
    if not rest or not table[step]:
        del table[step]


def looks_secret(text: str) -> bool:
    """Return whether a string contains a possible key, token or password."""
    return any(pattern.search(text) for pattern in (TOKEN, _OPAQUE, _TOLD, _IN_URL))


def _read(file: Path) -> str | None:
    """Return the file's text; None if it does not exist. Raises BadRequest if other users may read or write it.

    The notes must be private, because they state where keys are stored and where jobs run.
    """
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadRequest(f"{file}: the notes are not a regular file", "Replace it with a regular file.")
            if os.name == "posix" and status.st_uid != os.geteuid():
                raise BadRequest(f"{file}: the notes belong to another user", "Replace it with your own file.")
            if os.name == "posix" and status.st_mode & 0o077:
                mode = f"{status.st_mode & 0o777:04o}"
                raise BadRequest(f"{file}: other users can access the notes (mode {mode})", f"Run: chmod 600 {file}")
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadRequest(
            f"{file}: the notes can't be read: {error.strerror or error}", "Correct or remove it."
        ) from None
    if len(raw) > MAX_BYTES:
        raise BadRequest(f"{file}: the notes are larger than {MAX_BYTES:,} bytes", "Shorten them.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise BadRequest(f"{file}:{line}: this is not UTF-8", f"Save {file} as UTF-8.") from None


def _plain(value: Any) -> Any:
    """Convert TOML's dates and times to text, because no field has those types."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _strings(value: Any, loc: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield every string in the file with its path, and every key that looks like a secret."""
    if isinstance(value, str):
        yield loc, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if looks_secret(key):
                yield (*loc, key), key
            yield from _strings(item, (*loc, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _strings(item, (*loc, number))


def _lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Return the line of every table and key. tomllib does not report lines, so headings and names are parsed here."""
    found: dict[tuple[str | int, ...], int] = {}
    base: tuple[str, ...] = ()
    for number, line in enumerate(text.split("\n"), 1):
        if head := _HEADER.match(line):
            base = _chain(head[1])
            path = base
        elif name := _KEY.match(line):
            path = (*base, *_chain(f"{name[1]}=0"))
        else:
            continue
        for width in range(1, len(path) + 1):
            found.setdefault(path[:width], number)
    return found


def _chain(snippet: str) -> tuple[str, ...]:
    """Return the names in a heading or a dotted key."""
    try:
        table: Any = tomllib.loads(snippet)
    except tomllib.TOMLDecodeError:
        return ()
    names: list[str] = []
    while isinstance(table, dict) and table:
        name, table = next(iter(table.items()))
        names.append(name)
    return tuple(names)
