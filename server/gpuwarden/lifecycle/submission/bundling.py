"""Turn a script that imports the package `gputrain` into a single file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import InputFile
from gpuwarden.lifecycle.submission.inputs import program_of, script_in
from gpuwarden.static_analysis.bundle import IMPORTS, PACKAGE, bundled, shipped_package, sources_of
from gpuwarden.static_analysis.ecosystem_tables import listed
from gpuwarden.static_analysis.parsing import parse
from gpuwarden.static_analysis.script import read_header


def with_trainer_package(text: str, folder: Path | None = None) -> str:
    """Return a script with the package `gputrain` included, if it imports the package and its header does not list it.

    The package is read from the script's folder if the folder contains it; otherwise, the bundled package is used. A
    script that can't be parsed is returned unchanged, because the submit gate reports the error.

    Raises:
        BadRequest: the package in the folder can't be read.

    """
    if not IMPORTS.search(text):
        return text
    try:
        tree, _ = parse(text)
        header = read_header(text)
    except (BadRequest, RecursionError):
        return text
    if header is not None and PACKAGE in listed(header.dependencies):
        return text
    if folder is None or not (folder / PACKAGE).is_dir():
        return bundled(text, tree, shipped_package())
    # Files with other names, which some editors create, are skipped.
    names = sorted(file.name for file in (folder / PACKAGE).glob("*.py") if file.stem.isidentifier() and file.is_file())
    return bundled(text, tree, sources_of({name: script_in(folder, f"{PACKAGE}/{name}") for name in names}))


def script_file(root: Path, name: str) -> str:
    """Return the text of a script file in `root`, with the package included. Raises BadRequest like `script_in`."""
    return with_trainer_package(script_in(root, name), (root / name).parent)


def started_program(
    root: Path, command: Sequence[str], files: Sequence[InputFile]
) -> tuple[str, tuple[str, ...]] | None:
    """Return the text and the arguments of the input that a command starts; None if it does not start a Python file.

    If the package is also an input, the text includes it, because the analysis needs both in one text. The job runs the
    unchanged files. Raises BadRequest if the file has changed since it was listed, or is not text.
    """
    found = program_of(root, command, files)
    if found is None:
        return None
    path, text, args = found
    folder = (root / path).parent
    named = PurePosixPath(path).parent / PACKAGE / "__init__.py"
    return with_trainer_package(text, folder) if any(f.path == str(named) for f in files) else text, args
