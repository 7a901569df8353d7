"""Define the findings of an examination, which `verify.py` converts to a `Report`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.budget import Budget, ByteCount
from gpuwarden.checkpoints.file_model import Anatomy, Limits, Tensor
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.tree import Tree
from gpuwarden.core.evidence import Cause, Evidence

_TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", ".swp", "~", ".downloading")


def temporary(path: str) -> bool:
    """Return true if a path, or one of its folders, has a name that unfinished saves use for temporary files.

    Other names that begin with `tmp` are not temporary: the Trainer's default output folder is `tmp_trainer`.
    """
    return any(
        p.endswith(_TEMPORARY)
        or p.startswith((".tmp", "tmp-checkpoint-"))
        or ".tmp-" in p
        or ".tmp." in p
        or ".orbax-checkpoint-tmp" in p
        for p in path.split("/")
    )


@dataclass
class Entry(Evidence):
    """The findings about one file."""

    path: str
    format: str = "unknown"
    size: int = 0
    anatomy: Anatomy | None = None
    temporary: bool = False
    load: str = ""
    proved: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    sealed: bool = False
    # The format is unknown, so a copy can only be verified with a digest.
    unread: bool = False
    # The file is an image, a table or a log and contains no weights, so damage to it does not affect a checkpoint.
    aside: bool = False


@dataclass
class Expected:
    """The size and the digests that a manifest lists for one file."""

    size: int
    digests: dict[str, str]


@dataclass
class Judgement(Evidence):
    """A layout's findings about one folder. The default cause of a problem is a contradiction between files."""

    usual = (Cause.CONTRADICTION, Cause.UNREAD)

    layout: str
    path: str
    step: int | None = None
    proved: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    checkpoint: bool = False
    # Reasons why training can't resume from the folder. The folder may still be intact.
    resume: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    # Checks that were not made, each with the reason or a way to make it. They do not affect the verdict.
    unproved: list[str] = field(default_factory=list)


@dataclass
class Findings(Evidence):
    """The findings about one path. `problems` and `doubts` contain only those about several files or folders."""

    root: Path
    entries: dict[str, Entry]
    tree: Tree | None
    judgements: list[Judgement]
    doubts: list[str] = field(default_factory=list)
    # Files that exist but were not requested.
    beyond: list[str] = field(default_factory=list)
    # Number of valid manifests next to the files.
    manifests: int = 0
    open: Callable[[Path, str], Source] = Source
    # True if the tensors' bytes have been read. Layouts may then read some of these bytes again.
    content: bool = False
    problems: list[str] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)

    def __getitem__(self, path: str) -> Entry | None:
        return self.entries.get(path)

    def place(self, path: str) -> Path:
        """Return the path at which a file's bytes are stored."""
        if self.tree is None:
            return self.root
        return self.tree.blobs.get(path, self.tree.root / path)

    def within(self, folder: str) -> list[Entry]:
        """Return the entries of all files in a folder, or the entry of the file with this path."""
        return [e for p, e in self.entries.items() if not folder or p == folder or p.startswith(folder + "/")]

    def newest(self) -> Judgement | None:
        """Return the checkpoint with the highest step. At equal steps, prefer proven and then resumable checkpoints."""

        def rank(judgement: Judgement) -> tuple[int, bool, bool]:
            parts = (judgement, *self.within(judgement.path))
            return judgement.step or 0, all(p.verdict == "proven" for p in parts), not judgement.resume

        return max((j for j in self.judgements if j.checkpoint and j.step is not None), key=rank, default=None)

    def parsed(self, path: str) -> Any:
        """Return a file's parsed content, such as JSON or the nodes of a pickle; None if there is none."""
        entry = self[path]
        return entry.anatomy.content if entry and entry.anatomy else None

    def tensors(self, paths: Iterable[str]) -> dict[str, Tensor]:
        """Return all tensors in the given files, by name."""
        return {t.name: t for p in paths if (e := self[p]) and e.anatomy for t in e.anatomy.tensors}


@dataclass(frozen=True)
class ExamineOptions:
    """The options of an examination. `only` is the set of relative paths to examine; `open` opens a file."""

    content: bool = True
    threads: int = 2
    limits: Limits = field(default_factory=Limits)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    only: frozenset[str] | None = None
    progress: Callable[[int], None] | None = None
    budget: Budget | None = None
    open: Callable[[Path, str], Source] = Source
    # Returns the files in a tree that gpuwarden itself wrote, which are not examined.
    ours: Callable[[Tree], frozenset[str]] = lambda tree: frozenset()

    def expect(self, size: int) -> None:
        """Increase the progress total by the number of bytes that will be read."""
        if self.content and isinstance(self.progress, ByteCount):
            self.progress.expect(size)

    def note(self, count: int) -> None:
        """Count bytes that have been read. Raises Doubtful if a budget limit has been reached."""
        if self.progress:
            self.progress(count)
        if self.budget:
            self.budget.take(count)
