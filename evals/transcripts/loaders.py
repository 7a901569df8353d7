"""Find the loader for a transcript. A loader is a module `load_<format>.py` in this folder, found by its name.

Each loader has `claims(source) -> bool`, which is true only for its own format, and `load(source) -> list[Transcript]`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from evals.errors import EvalError
from evals.transcripts.canonical import Meta, Problem, Transcript
from evals.transcripts.source import Source

_PREFIX = "load_"


class Loader(Protocol):
    """The interface of a `load_<format>` module."""

    def claims(self, source: Source) -> bool:
        """Return true only if the file has this format."""
        ...

    def load(self, source: Source) -> list[Transcript]:
        """Load all transcripts in the file. In most formats, a file has one transcript."""
        ...


def formats() -> list[str]:
    """Return the names of all formats that can be read, sorted."""
    return sorted(p.stem.removeprefix(_PREFIX) for p in Path(__file__).parent.glob(f"{_PREFIX}*.py"))


@cache
def loader(name: str) -> Loader:
    """Return the loader for the format with this name. Raises EvalError if the name is unknown."""
    if name not in formats():
        raise EvalError(f"unknown transcript format {name!r}", f"The formats are {', '.join(formats())}.")
    return cast("Loader", importlib.import_module(f"evals.transcripts.{_PREFIX}{name}"))


def recognise(source: Source) -> list[str]:
    """Return the formats whose loaders claim a file. A file can be read only if exactly one loader claims it."""
    return [name for name in formats() if loader(name).claims(source)]


def read(path: Path, *, format: str | None = None, bare: str | None = None) -> list[Transcript]:  # noqa: A002
    """Read a transcript file. Errors in its content are listed in `problems` and not raised."""
    source = Source(path, bare=bare)
    return read_source(source, format)


def read_source(source: Source, format: str | None = None) -> list[Transcript]:  # noqa: A002
    """Load the transcripts in a source that is already open, as `read` does."""
    transcripts = _transcripts(source, format)
    for transcript in transcripts:
        own = [p if p.file else replace(p, file=source.path.name) for p in transcript.problems]
        transcript.problems[:] = [*source.problems, *own]
    return transcripts


def _transcripts(source: Source, format: str | None) -> list[Transcript]:  # noqa: A002
    """Load a source with the only loader that claims it; if that fails, return an empty transcript with the problem."""
    if not source.data:
        return [_unreadable("is empty")]
    if format is None:
        claimed = recognise(source)
        if len(claimed) != 1:
            return [_unreadable(f"looks like {' and '.join(claimed)}" if claimed else "has an unknown format")]
        format = claimed[0]  # noqa: A001
    try:
        return loader(format).load(source) or [_unreadable("contains no transcript")]
    except Exception as error:  # a corrupt file must make its trial invalid, not stop the scoring of the run
        return [_unreadable(f"caused an error in the loader of {format}: {error!r}")]


def _unreadable(why: str) -> Transcript:
    return Transcript(Meta(format="unknown"), [], [], [Problem("unreadable", why)])
