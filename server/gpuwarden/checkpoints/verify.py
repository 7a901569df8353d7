"""Verify a checkpoint with one call: prove it, or report the problems and doubts.

Each level proves:

- `structure`: every file is complete according to its format, shards match the index, and no file is missing. For the
  most common architectures, the config, tensors and tokenizer match. All parts of a checkpoint are at the same step.
  Only headers are read, which takes milliseconds. A changed byte inside a tensor goes undetected.
- `content`: in addition, every CRC and every recorded digest matches, and all values are finite. If neither the
  format nor a manifest has a checksum, a changed byte goes undetected as long as the value is finite. `not_checked`
  then lists this as an open question.
- `load`: in addition, the tensors can be loaded, and the installed version of transformers can build the model in the
  config from them. Both checks run in separate processes.
- `resume`: in addition, everything that a resume needs is present and consistent.

If a manifest is given, exactly the files in it are verified: all of them must exist and match their digests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.build import build
from gpuwarden.checkpoints.compare import Comparison, compare
from gpuwarden.checkpoints.examine import GAVE_UP, examine
from gpuwarden.checkpoints.file_model import Broken, Doubtful, Limits, short, some
from gpuwarden.checkpoints.findings import Entry, ExamineOptions, Expected, Findings, Judgement
from gpuwarden.checkpoints.load import LoadLimits, load
from gpuwarden.checkpoints.sealing import manifest as manifests
from gpuwarden.checkpoints.tree import Tree
from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.evidence import Cause, Evidence, gravest_first
from gpuwarden.core.evidence import verdict as verdict_of
from gpuwarden.core.models import CheckpointEvidence, FileEvidence, Level, Manifest, Report, Verdict
from gpuwarden.core.safe_names import LOG_NAME, STAGING

WHO = (
    "who wrote the manifest next to the files: any program with write access can forge it, so it can only reveal damage"
)

# The maximum length of a job id, and the files in a pull's staging folder with their maximum sizes in bytes.
_LONGEST = 200
_BESIDE = {"lock": 0, "owner": _LONGEST, LOG_NAME: 1 << 30}


def verify(
    path: Path,
    level: Level = Level.CONTENT,
    *,
    manifest: Manifest | None = None,
    under: str = "",
    expected: Mapping[str, Expected] | None = None,
    against: Path | Findings | None = None,
    threads: int = 2,
    limits: Limits | None = None,
    load_limits: LoadLimits | None = None,
    budget: Budget | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Verify a checkpoint file, a checkpoint folder, or a folder that contains all of a run's outputs.

    The files are compared with `manifest`, in which `path` has the name `under`. If `manifest` is None, a manifest that
    was written next to the checkpoint at save time is used, if one exists. `expected` contains sizes and digests from
    another source for some of the files. `against` is an earlier checkpoint that this one should differ from, an
    adapter's base, or a GGUF file's source, given as a path or as findings. `progress` is called from several threads
    with the number of bytes read since the last call. Invalid content never raises an exception; an invalid or missing
    path raises BadRequest or NotFound.
    """
    path = usable(path)
    ask = ExamineOptions(level is not Level.STRUCTURE, threads, limits or Limits(), progress=progress, budget=budget)
    ask = replace(ask, expected=expected or {}, ours=_pull_files)
    found, extra = _examine(path, level, manifest, under, ask)
    if level in (Level.LOAD, Level.RESUME):
        good = [e for e in found.entries.values() if e.verdict == Verdict.PROVEN]
        load(found, good, load_limits, budget)
        build([found], budget)
    if against is not None:
        other = (
            against
            if isinstance(against, Findings)
            else examine(usable(against), replace(ask, content=False, expected={}))
        )
        _compare(found, other, extra)
    return _report(str(path), level, found, extra)


def report(
    found: Findings,
    level: Level,
    path: str,
    against: Findings | None = None,
    compared: Mapping[str, Comparison] | None = None,
) -> Report:
    """Return the report for an examination on another machine. `path` is the checkpoint's path on that machine.

    `compared` maps the name of the other path to the result of the comparison on that machine.
    """
    extra = _Extra()
    if against is not None:
        _compare(found, against, extra)
    for name, result in (compared or {}).items():
        _add_compared(result, name, extra)
    return _report(path, level, found, extra)


def _compare(found: Findings, other: Findings, extra: _Extra) -> None:
    name = short(other.root.name, 60)
    try:
        result = compare(found, other)
    except (Broken, Doubtful, *GAVE_UP) as why:
        extra.doubt(f"could not be compared with {name}: {short(why, 80)}")
        return
    _add_compared(result, name, extra)


def _add_compared(result: Comparison, name: str, extra: _Extra) -> None:
    extra.proved += [f"compared: {line}" for line in result.proved]
    extra.warnings += [f"compared: {line}" for line in result.warnings]
    for line in result.problems:
        extra.refute(f"compared with {name}: {line}", Cause.CONTRADICTION)
    for line in result.doubts:
        extra.doubt(f"compared with {name}: {line}")


def usable(path: Path) -> Path:
    """Return the path if it exists. Raises BadRequest or NotFound."""
    path = Path(path)
    try:
        there = path.exists()
    except (OSError, ValueError) as why:
        raise BadRequest(f"{short(path)!r} is not a valid path: {why}", "Use the path of a file or a folder.") from why
    if not there:
        raise NotFound(
            f"no file or folder exists at {short(path)}",
            "Use the path of a checkpoint, the id of a job, or hf://owner/name.",
        )
    return path


class _Extra(Evidence):
    """The parts of a report that are not about a single file or folder."""

    def __init__(self) -> None:
        self.proved: list[str] = []
        self.warnings: list[str] = []
        self.problems: list[str] = []
        self.doubts: list[str] = []
        self.causes: list[Cause] = []
        self.not_checked: list[str] = []


def _pull_files(tree: Tree) -> frozenset[str]:
    """Return the files that a pull adds to the artifacts: its lock, the file with the job id, and the job's log."""
    found: set[str] = set()
    for folder in tree.folders:
        staging = folder.folders.get(STAGING)
        if staging is None or staging.files.get("owner", _LONGEST + 1) > _LONGEST:
            continue
        found.update(staging.join(n) for n, most in _BESIDE.items() if staging.files.get(n, most + 1) <= most)
        if LOG_NAME in folder.files:
            found.add(folder.join(LOG_NAME))
    return frozenset(found)


def _examine(
    path: Path, level: Level, manifest: Manifest | None, under: str, ask: ExamineOptions
) -> tuple[Findings, _Extra]:
    """Examine the files in the manifest and compare them with it. Without a manifest, examine all files."""
    extra = _Extra()
    if manifest is None:
        found = examine(path, ask)
        if found.manifests and any(e.sealed for e in found.entries.values()):
            extra.not_checked.append(WHO)
        return found, extra
    listed = manifests.expected((f.model_dump() for f in manifest.files), under)
    # If an output has the same name as the log, a pull stores the log elsewhere.
    ask = replace(ask, expected=listed, only=frozenset(listed), ours=lambda tree: _pull_files(tree) - listed.keys())
    found = examine(path, ask)
    gone = sorted(n for n in listed if n not in found.entries)
    if gone:
        extra.refute(f"{len(gone):,} files in the manifest are missing: {some(gone)}")
    base = under.strip("/")
    never = [m for m in manifest.missing if not base or (m.lstrip("/") + "/").startswith(base + "/")]
    if never:
        extra.refute(
            f"some declared outputs did not exist when the manifest was made: {some(never)}", Cause.CONTRADICTION
        )
    if level is not Level.STRUCTURE:
        for entry in found.entries.values():
            if entry.path in listed and not entry.sealed and not entry.problems and not entry.doubts:
                entry.doubt("the manifest has no digest for this file, so the copy can't be verified", Cause.UNSEALED)
    # A pull adds the log and its staging folder to the artifacts.
    others = [name for name in found.beyond if name != LOG_NAME and not name.startswith(f"{STAGING}/")]
    if others:
        extra.not_checked.append(f"{len(others):,} files that are not in the manifest: {some(others)}")
    if not listed:
        extra.doubt("the manifest does not list any file in this folder")
    return found, extra


def _report(path: str, level: Level, found: Findings, extra: _Extra) -> Report:
    files = tuple(_file(e) for e in found.entries.values())
    checkpoints = tuple(_checkpoint(j, found) for j in found.judgements if j.checkpoint)
    unread = frozenset(e.path for e in found.entries.values() if e.unread and e.sealed and not e.problems)
    aside = frozenset(e.path for e in found.entries.values() if e.aside and e.sealed and e.problems)
    plain = [j for j in found.judgements if not j.checkpoint]
    whole = _Extra()
    whole.adopt(found)
    whole.adopt(extra)
    for j in plain:
        whole.adopt(replace(j, problems=[_at(j, p) for p in j.problems], doubts=[_at(j, d) for d in j.doubts]))
    if not files and not whole.problems:
        whole.doubt("has no files to verify")
    resumable = [c for c in checkpoints if c.verdict is Verdict.PROVEN and c.step is not None]
    newest = max(resumable, key=lambda c: (c.step or 0, not c.resume), default=None)
    if level is Level.RESUME:
        if newest is None:
            whole.doubt("found no proven checkpoint with a step from which training could resume")
        else:
            for line in newest.resume:
                whole.refute(f"{newest.path}: {line}", Cause.NO_RESUME)
    left = unread | aside
    readable = [c for j in found.judgements if j.checkpoint for c in _checkpoint(j, found, left).causes]
    readable += [c for f in files if f.path not in left for c in f.causes]
    parts: list[FileEvidence | CheckpointEvidence] = [*files, *checkpoints]
    causes = gravest_first([*whole.why, *(c for part in parts for c in part.causes)])
    # The checks that the layouts could not make. Each line occurs once, with the first folder that it applies to.
    still_open = {line: _at(j, line) for j in reversed(found.judgements) for line in j.unproved}.values()
    return Report(
        path=path,
        level=level,
        verdict=Verdict(verdict_of(causes)),
        causes=causes,
        unread=tuple(sorted(unread)),
        aside=tuple(sorted(aside)),
        readable=Verdict(verdict_of([*readable, *whole.why])),
        files=files,
        checkpoints=checkpoints,
        proved=tuple(extra.proved + [_at(j, p) for j in plain for p in j.proved]),
        warnings=tuple(extra.warnings + [_at(j, w) for j in plain for w in j.warnings]),
        doubts=tuple(whole.doubts),
        problems=tuple(whole.problems),
        not_checked=(*extra.not_checked, *still_open, *_not_checked(level, found)),
        step=newest.step if newest else None,
        newest=newest.path if newest else "",
        bytes=sum(f.size for f in files),
    )


def _at(judgement: Judgement, line: str) -> str:
    return f"{short(judgement.path)}: {line}" if judgement.path else line


def _file(entry: Entry) -> FileEvidence:
    """Convert the findings about a file to the report format."""
    return FileEvidence(
        path=entry.path,
        format=entry.format,
        verdict=Verdict(entry.verdict),
        causes=entry.why,
        size=entry.size,
        proved=tuple(entry.proved),
        unproved=tuple(entry.unproved),
        warnings=tuple(entry.warnings),
        doubts=tuple(entry.doubts),
        problems=tuple(entry.problems),
        sealed=entry.sealed,
    )


def _checkpoint(judgement: Judgement, found: Findings, without: frozenset[str] = frozenset()) -> CheckpointEvidence:
    """Return the combined findings about a folder and its files, except the files in `without`."""
    same = [j for j in found.judgements if j.path == judgement.path]
    below = [j for j in found.judgements if not judgement.path or j.path.startswith(judgement.path + "/")]
    below = same + [j for j in below if j not in same]
    problems = [_at(j, p) if j.path != judgement.path else p for j in below for p in j.problems]
    doubts = [_at(j, d) if j.path != judgement.path else d for j in below for d in j.doubts]
    # Whether a resume works depends only on the folder itself and on DeepSpeed's parts in it.
    part = re.compile(re.escape(judgement.path + "/" if judgement.path else "") + r"global_step\d+")
    resume = [
        r for j in below if j.path == judgement.path or (not j.checkpoint and part.fullmatch(j.path)) for r in j.resume
    ]
    within = [e for e in found.within(judgement.path) if e.path not in without]
    causes = gravest_first(c for result in (*within, *below) for c in result.why)
    if not within and not causes:
        causes = (Cause.UNREAD,)
    return CheckpointEvidence(
        path=judgement.path or ".",
        layout=judgement.layout,
        verdict=Verdict(verdict_of(causes)),
        causes=causes,
        step=judgement.step,
        proved=tuple(p for j in same for p in j.proved),
        warnings=tuple(w for j in same for w in j.warnings),
        doubts=tuple(doubts),
        problems=tuple(problems),
        resume=tuple(resume),
    )


def _not_checked(level: Level, found: Findings) -> list[str]:
    """Return the checks that this level omits, each with a way to perform it."""
    lines = []
    unsealed = sum(not e.sealed for e in found.entries.values())
    if level is Level.STRUCTURE:
        lines.append("the bytes inside the tensors; use level content")
    elif unsealed:
        lines.append(
            f"whether {unsealed:,} files are identical to the saved ones; "
            "write a manifest at save time, or verify against the machine's manifest"
        )
    if level in (Level.STRUCTURE, Level.CONTENT):
        lines.append("whether the tensors can be loaded; use level load")
    if level is not Level.RESUME:
        lines.append("whether training can resume from here; use level resume")
    return lines
