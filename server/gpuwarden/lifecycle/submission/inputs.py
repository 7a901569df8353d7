"""Find a job's input files in the working directory, list them with digests, and search them for secrets.

An agent chooses the files, and a third party's machine receives them. Therefore paths and links to files outside of the
working directory, hidden files, and files that look like keys are refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.core.models import MAX_INPUT_BYTES, MAX_SCRIPT_BYTES, InputFile, clean_path
from gpuwarden.core.safe_names import local_name
from gpuwarden.core.sanitize import SECRET_FILE, TOKEN, line
from gpuwarden.remote.transfer.safe_open import identity_of, open_regular
from gpuwarden.rules.facts import Leak
from gpuwarden.static_analysis.script import decode

MAX_FILES: Final = 1_000
MAX_LOOKED: Final = 20_000
MORE: Final = "Pass fewer inputs; upload larger data to a dataset on the Hub and load it by its id."
BLOCK: Final = 1 << 20
_OVERLAP: Final = 8 << 10
"""Bytes at the end of a block that are searched again with the next block, to find a token that spans both blocks."""
_NEVER: Final = frozenset({"__pycache__", "node_modules", "pyvenv.cfg"})


@dataclass(frozen=True)
class Inputs:
    """A job's input files, sorted by path; the skipped files; and the files that look like secrets."""

    files: tuple[InputFile, ...] = ()
    left_out: tuple[str, ...] = ()
    leaks: tuple[Leak, ...] = ()


def list_inputs(root: Path, names: Sequence[str], ours: Mapping[str, str], kept: Sequence[Path] = ()) -> Inputs:
    """List the files at the paths `names` in `root`.

    `ours` maps names of secrets to values that no file may contain. `kept` lists files and folders that are never sent.
    Raises `BadRequest` for a path that can't be sent.
    """
    try:
        walk = _Walk(root.resolve(), tuple(path.resolve() for path in kept))
        for name in names:
            walk.add(name)
        read = [_read(path, real, ours) for path, real in sorted(walk.found.items())]
    except OSError as error:
        raise BadRequest(f"the inputs can't be read: {error}", "Retry once the files stop changing.") from error
    leaks = tuple(leak for _, leak in read if leak is not None)
    return Inputs(tuple(file for file, _ in read), tuple(sorted(walk.left_out)), leaks)


def real_path(root: Path, name: str, what: str = "input") -> Path:
    """Resolve a path through all links. Raises `BadRequest` for a path that is outside of `root` or hidden."""
    root = root.resolve()
    try:
        real = (root / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # ValueError for a NUL character
        raise BadRequest(f"the {what} {line(name)} was not found", "Pass a file in the working directory.") from error
    if not real.is_relative_to(root) or real == root:
        raise BadRequest(
            f"the {what} {line(name)} is outside of the working directory",
            "Copy it into the working directory, or omit it.",
        )
    if any(part.startswith(".") for part in (*Path(name).parts, *real.relative_to(root).parts)):
        raise BadRequest(f"the {what} {line(name)} is hidden, or is in a hidden folder", "Hidden files are never sent.")
    return real


def script_in(root: Path, name: str) -> str:
    """Return the text of a script file in `root`.

    Raises `BadRequest` for a path that is missing, hidden or outside of `root`, and for a file that is too large.
    """
    real = real_path(root, name, "script")
    with open_regular(real, identity_of(real.lstat())) as file:
        raw = file.read(MAX_SCRIPT_BYTES + 1)
    if len(raw) > MAX_SCRIPT_BYTES:
        raise BadRequest(
            f"the script {line(name)} is larger than {MAX_SCRIPT_BYTES:,} bytes", "Move its data to a file or dataset."
        )
    if real_path(root, name, "script") != real:
        raise BadRequest(f"the script {line(name)} was replaced while being read", "Retry once it stops changing.")
    return decode(raw)


def below(root: Path, file: Path) -> str:
    """Return a file's path relative to `root`, as for an input; empty if the file is outside of `root` or hidden."""
    try:
        inner = Path(os.path.relpath(file, root))
        real_path(root, inner.as_posix())
    except (BadRequest, ValueError):
        return ""
    return inner.as_posix() if ".." not in inner.parts else ""


def program_of(
    root: Path, command: Sequence[str], files: Sequence[InputFile]
) -> tuple[str, str, tuple[str, ...]] | None:
    """Return the path, the text and the arguments of the input that a command starts; None if it does not start a
    Python file.

    Raises `BadRequest` if the file has changed since it was listed, or is not text.
    """
    listed = {file.path: file for file in files}
    for n, word in enumerate(command):
        file = listed.get(word.removeprefix("./"))
        if file is not None and word.endswith(".py") and file.size <= MAX_SCRIPT_BYTES:
            with open_regular(real_path(root, file.path)) as program:
                raw = program.read(MAX_SCRIPT_BYTES + 1)
            if hashlib.sha256(raw).hexdigest() != file.sha256:
                raise BadRequest(
                    f"the input {line(file.path)} changed while being read", "Retry once it stops changing."
                )
            return file.path, decode(raw), tuple(command[n + 1 :])
    return None


class _Walk:
    """Finds the given files, and all files in the given folders. `found` maps paths on the machine to local paths."""

    def __init__(self, root: Path, kept: tuple[Path, ...] = ()) -> None:
        self.root, self.kept = root, kept
        self.found: dict[str, Path] = {}
        self.left_out: set[str] = set()
        self.bytes = self.looked = 0

    def add(self, name: str) -> None:
        """Add the files at or under one path."""
        real = real_path(self.root, name)
        before = len(self.found)
        known = any(n == name or n.startswith(name + "/") for n in self.found)
        if real.is_dir():
            for path, where in self._folder(name, real):
                self._file(path, where)
        else:
            self._file(name, real)
        if len(self.found) == before and not known:
            raise BadRequest(f"the input folder {line(name)} contains no files that can be sent", "Omit it.")

    def _folder(self, name: str, real: Path) -> Iterator[tuple[str, Path]]:
        """Yield every file in a folder. Only links to files are followed, so that the walk has no cycles."""
        waiting = [(name, real)]
        while waiting:
            above, folder = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    listed = sorted(entries, key=lambda e: e.name)
            except OSError as error:
                why = f"the input folder {line(above)} can't be read: {error.strerror}"
                raise BadRequest(why, "Omit it.") from error
            for entry in listed:
                path = f"{above}/{entry.name}"
                self.looked += 1
                if self.looked > MAX_LOOKED:
                    raise BadRequest(f"the inputs have more than {MAX_LOOKED:,} entries", MORE)
                # skip caches, settings and virtual environments
                never = entry.name.startswith(".") or entry.name in _NEVER or entry.name.endswith((".pyc", ".pyo"))
                if never or (entry.is_dir(follow_symlinks=False) and os.path.lexists(f"{entry.path}/pyvenv.cfg")):
                    self.left_out.add(_printable(path))
                elif entry.is_symlink():
                    real = real_path(self.root, path)
                    if real.is_dir():
                        raise BadRequest(f"the input {line(path)} is a link to a folder", "Pass the folder itself.")
                    yield path, real
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append((path, Path(entry.path)))
                else:
                    yield path, Path(entry.path)

    def _file(self, path: str, real: Path) -> None:
        try:
            path.encode()
            sound = clean_path(path) == path and bool(local_name(path, windows=False))
        except (ValueError, BadReply):
            sound = False
        if not sound:  # on another system, the name could refer to a different path
            raise BadRequest(
                f"the input {_printable(path)!r} has a name that can't be sent",
                "Rename it: avoid control characters, newlines, backslashes, invalid UTF-8, and folders named machine.",
            )
        info = real.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise BadRequest(
                f"the input {line(path)} is not a regular file", "Devices, pipes and sockets are never sent."
            )
        if path in self.found:
            return
        if any(real == own or own in real.parents for own in self.kept):
            raise BadRequest(f"the input {line(path)} is a gpuwarden state or policy file", "Omit it.")
        self.found[path] = real
        self.bytes += info.st_size
        if len(self.found) > MAX_FILES:
            raise BadRequest(f"the inputs have more than {MAX_FILES:,} files", MORE)
        if self.bytes > MAX_INPUT_BYTES:
            raise BadRequest(f"the inputs are larger than {MAX_INPUT_BYTES >> 20} MiB", MORE)


def _printable(path: str) -> str:
    """Return a path, which may contain any bytes, as one printable line."""
    return line(path.encode("utf-8", "backslashreplace").decode())


def _read(path: str, real: Path, ours: Mapping[str, str]) -> tuple[InputFile, Leak | None]:
    """Return a file's manifest entry, and a leak if the file looks like a secret or contains one."""
    seen, size, tail = hashlib.sha256(), 0, b""
    kind = (
        "a key file, judging by its name"
        if _is_key_name(path) or _is_key_name(real.name)
        else _secret_in(path.encode(), ours)
    )
    with open_regular(real) as file:
        while block := file.read(BLOCK):
            size += len(block)
            if size > MAX_INPUT_BYTES:
                raise BadRequest(f"the input {line(path)} grew while being read", "Retry once it stops changing.")
            seen.update(block)
            kind = kind or _secret_in(tail + block, ours)
            tail = block[-_OVERLAP:]
    return InputFile(path=path, size=size, sha256=seen.hexdigest()), Leak(path, kind) if kind else None


def _is_key_name(path: str) -> bool:
    return SECRET_FILE.fullmatch(path.rpartition("/")[2]) is not None


def _secret_in(block: bytes, ours: Mapping[str, str]) -> str:
    known = next((name for name, value in ours.items() if value.encode("utf-8", "surrogateescape") in block), None)
    if known:
        return f"the value of {known}"
    return "a token or a private key" if TOKEN.search(block.decode("utf-8", "replace")) else ""
