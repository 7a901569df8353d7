"""Examine the structure and content of a file or folder. Standard library only, so it runs on any machine.

`verify.verify` calls `examine` locally; `archive.py` runs it on the machine that stores the files.
"""

from __future__ import annotations

import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints import scheduling
from gpuwarden.checkpoints.file_model import (
    Anatomy,
    Broken,
    Doubtful,
    Limits,
    Unread,
    short,
    some,
)
from gpuwarden.checkpoints.findings import Entry, ExamineOptions, Expected, Findings, Judgement, temporary
from gpuwarden.checkpoints.layouts import stepped, training_file
from gpuwarden.checkpoints.plugins import FORMATS, LAYOUTS
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.tree import Tree, walk
from gpuwarden.checkpoints.values import checksums, content_scan, data_arrays, emptiness, heuristics, nonfinite, pages
from gpuwarden.core.evidence import Cause

NO_SEAL = "whether the bytes are the ones that were saved, because no digest was recorded"
_SHA256 = re.compile("[0-9a-f]{64}")
# Exceptions that a reader may raise on untrusted data.
GAVE_UP = (
    MemoryError, RuntimeError, OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, EOFError,
    struct.error,
)  # fmt: skip
_LFS = b"version https://git-lfs.github.com/spec/"


def examine(path: Path, ask: ExamineOptions) -> Findings:
    """Examine a file, or all files in a folder. Invalid content never raises an exception."""
    if path.is_dir():
        return examine_tree(walk(path, ask.limits, ask.budget), ask)
    unreadable, manifests = Anatomy("manifest"), 0
    if ask.only is None and not ask.expected and manifest.beside(path).is_file():
        try:
            ask = replace(ask, expected=manifest.read(manifest.beside(path), ask.limits))
            manifests = 1
            if path.name not in ask.expected:
                listed = short(manifest.beside(path).name, 80)
                unreadable.refute(f"the manifest {listed} does not list this file", Cause.CONTRADICTION)
        except Broken as why:
            unreadable.refute(str(why), why.cause)
        except Doubtful as why:
            unreadable.doubt(str(why), why.cause)
    # `path` itself may be a link, because the caller chose it. Links inside a folder may be hostile.
    real = Path(os.path.realpath(path))
    ask.expect(real.stat().st_size if real.is_file() else 0)
    entry = examine_file(real, path.name, ask)
    entry.adopt(unreadable)
    found = Findings(real, {path.name: entry}, None, [], manifests=manifests, open=ask.open, content=ask.content)
    data_arrays.judge(found)
    emptiness.judge(found)
    alone = training_file.of_entry(entry, found)
    found.judgements += [alone] if alone else []
    _only_temporary(found)
    return found


def examine_tree(tree: Tree, ask: ExamineOptions) -> Findings:
    """Examine every file in a tree, then check its folders with the layouts."""
    found = Findings(tree.root, {}, tree, [], list(tree.doubts), open=ask.open, content=ask.content)
    ours = ask.ours(tree)
    for folder in tree.folders if ours else ():
        folder.files = {n: size for n, size in folder.files.items() if folder.join(n) not in ours}
    if ask.only is None:
        ask = replace(ask, expected={**_sealed(tree, ask, found), **ask.expected})
    else:
        found.beyond = tree.restrict(ask.only)
    sizes = tree.files
    ask.expect(sum(sizes.values()))
    together, apart = (
        scheduling.plan(sizes, ask.threads, 2 * content_scan.SEGMENT) if ask.content else ([], list(sizes))
    )

    def one(name: str, how: ExamineOptions) -> Entry | None:
        return None if ask.budget and ask.budget.spent else examine_file(found.place(name), name, how)

    looked = {n: one(n, ask) for n in together}
    alone = replace(ask, threads=1)
    with ThreadPoolExecutor(max_workers=max(1, ask.threads)) as pool:
        looked.update(zip(apart, pool.map(lambda n: one(n, alone), apart)))  # noqa: B905
    found.entries.update((n, entry) for n in sizes if (entry := looked[n]) is not None)
    data_arrays.judge(found)
    left_out = [n for n in sizes if looked[n] is None]
    for folder in tree.folders:
        for name, why in folder.odd.items():
            found.entries[folder.join(name)] = Entry(folder.join(name), doubts=[why], causes=[Cause.UNREAD])
    if left_out or tree.doubts:
        found.judgements.clear()  # A layout would report unread files as missing.
        spent = ask.budget.spent if ask.budget else ""
        if left_out:
            found.doubt(f"{len(left_out):,} files were not examined ({spent}): {some(left_out)}", Cause.LIMIT)
        found.doubt("the folders were not checked, because not all of their files were examined", Cause.LIMIT)
    else:
        judge(found)
    emptiness.judge(found)
    _only_temporary(found)
    return found


def _only_temporary(found: Findings) -> None:
    """Record a doubt if all weights are in temporary files, which are not examined."""
    weights = [e for e in found.entries.values() if stepped.like_weights(e.path)]
    if not weights or not all(e.temporary for e in weights) or any(j.checkpoint for j in found.judgements):
        return
    names = some(e.path for e in weights)
    found.doubt(f"all weights are left over from unfinished saves and were not examined: {names}", Cause.CHANGING)


def _sealed(tree: Tree, ask: ExamineOptions, found: Findings) -> dict[str, Expected]:
    """Return the sizes and digests from the manifests that were saved with the tree."""
    # In a Hub cache, a large file's blob is named after the SHA-256 of its content.
    blobs = ((rel, path) for rel, path in tree.blobs.items() if _SHA256.fullmatch(path.name))
    expected = {rel: Expected(tree.files[rel], {"sha256": path.name}) for rel, path in blobs}
    for folder in sorted(tree.folders, key=lambda f: f.rel):
        for name in sorted(n for n in folder.files if n.endswith(manifest.FILE) and not temporary(n)):
            judgement = Judgement("manifest", folder.rel)
            found.judgements.append(judgement)
            try:
                listed = manifest.read(found.place(folder.join(name)), ask.limits, ask.open)
            except Broken as why:
                judgement.refute(str(why), why.cause)
                continue
            except Doubtful as why:
                judgement.doubt(str(why), why.cause)
                continue
            gone = [n for n in listed if n not in tree.files and folder.join(n) not in tree.files]
            if gone:
                judgement.refute(f"the manifest lists files that no longer exist: {some(gone)}", Cause.DAMAGE)
            else:
                judgement.proved.append(f"all {len(listed):,} files in the manifest exist")
            found.manifests += 1
            expected.update((folder.join(n), e) for n, e in listed.items())
    return expected


def judge(found: Findings) -> None:
    """Check each folder with every layout that it matches."""
    if found.tree is None:
        return
    plugins = [p for _, p in LAYOUTS.usable()]
    found.doubts += [f"a layout plug-in can't be used, so its checks were skipped: {s.fault}" for s in LAYOUTS.broken()]
    for folder in sorted(found.tree.folders, key=lambda f: f.rel):
        for plugin in plugins:
            try:
                if not plugin.claims(folder):
                    continue
                judgement = plugin.judge(folder, found)
            except (Broken, Doubtful, *GAVE_UP) as why:  # The content is invalid, or a file was removed.
                judgement = Judgement(plugin.NAME, folder.rel, doubts=[f"could not be checked: {short(why, 80)}"])
            if not isinstance(judgement, Judgement):
                fault = f"could not be checked: the layout plug-in returned {short(judgement)}"
                judgement = Judgement(plugin.NAME, folder.rel, doubts=[fault])
            found.judgements.append(judgement)


def examine_file(path: Path, name: str, ask: ExamineOptions) -> Entry:
    """Examine one file. Reader errors are recorded as findings and never raised."""
    entry = Entry(name, temporary=temporary(name))
    try:
        with ask.open(path, name) as source:
            entry.size = source.size
            source.took = ask.budget.take if ask.budget else None  # so that a reader can't exceed the budget
            _examine(source, entry, ask)
            if source.changed():
                entry.doubt("was written to while it was read", Cause.CHANGING)
    except Broken as why:
        entry.refute(str(why), why.cause)
    except Doubtful as why:
        entry.doubt(str(why), why.cause)
    except MemoryError:
        entry.doubt("the reader ran out of memory", Cause.LIMIT)
    except GAVE_UP as why:
        entry.doubt(f"the reader failed: {type(why).__name__}: {short(why, 80)}")
    return entry


def _examine(source: Source, entry: Entry, ask: ExamineOptions) -> None:
    expected = ask.expected.get(entry.path)
    head = source.head()
    if expected and expected.size != source.size:
        raise Broken(f"has {source.size:,} bytes; the manifest lists {expected.size:,}")
    try:
        anatomy = _read(source, entry, head, ask.limits)
    except Broken as why:
        anatomy = Anatomy(entry.format, problems=[str(why)], causes=[why.cause])
        entry.aside = heuristics.no_weights(entry.path, head, source.size)
    except Doubtful as why:
        anatomy = Anatomy(entry.format, doubts=[str(why)], causes=[why.cause])
        harmless = not heuristics.like_weights(entry.path, head, source.size)
        unclaimed = entry.format == "unknown" and not heuristics.disguised(head, source.size)
        entry.unread = isinstance(why, Unread) and (harmless or unclaimed)
    entry.anatomy = anatomy
    entry.proved += anatomy.proved
    entry.unproved += anatomy.unproved
    entry.warnings += anatomy.warnings
    entry.adopt(anatomy)
    # A file in an unsupported format may still match its recorded digest.
    if ask.content and (expected or not (entry.problems or entry.doubts)):
        _content(source, entry, anatomy, expected, ask)
    if entry.temporary and entry.sealed:
        entry.unproved.append(
            "its content, because the file is left over from an unfinished save and is not part of a checkpoint"
        )
    elif entry.temporary:
        entry.doubt(
            "is left over from an unfinished save; delete it, or find the process that is writing it", Cause.CHANGING
        )
    elif anatomy.opaque and not entry.sealed:
        entry.doubt("can only be verified with a digest recorded at save time, and none was compared", Cause.UNSEALED)


def _read(source: Source, entry: Entry, head: bytes, limits: Limits) -> Anatomy:
    """Read the file's structure with the reader for its format.

    An empty file is accepted only if its format is text or JSON lines, or its name is `__init__.py` or `.gitkeep`.
    """
    if entry.temporary:
        entry.format = "temporary"
        return Anatomy("temporary")
    if head.startswith(_LFS):
        raise Broken("is a Git LFS pointer, not the file itself; fetch it with `git lfs pull` or from the Hub")
    name = entry.path.rsplit("/", 1)[-1]
    plugin = reader(name, head)
    if plugin:
        entry.format, entry.load = plugin.NAME, plugin.LOAD
    if not source.size:
        if entry.format in ("text", "jsonl") or name in ("__init__.py", ".gitkeep"):
            return Anatomy(entry.format, proved=["empty"])
        raise Broken("is empty")  # the save failed
    if plugin is None:
        raise Unread("; ".join(("has an unknown format", *(s.fault for s in FORMATS.broken()))))
    anatomy = plugin.read(source, limits)
    if not isinstance(anatomy, Anatomy):
        raise Doubtful(f"its reader returned {type(anatomy).__name__}, not an Anatomy")
    entry.format = anatomy.format
    holes = source.holes()
    if holes >= 4096:
        anatomy.warnings.append(f"{holes:,} bytes were never written: the file has holes, which are read as zeros")
    return anatomy


def _content(source: Source, entry: Entry, anatomy: Anatomy, expected: Expected | None, ask: ExamineOptions) -> None:
    """Read all bytes once: compare checksums and recorded digests, and search for NaN and infinity."""
    # If the caller passed the manifest, the strongest digest is compared. A manifest next to the files can only reveal
    # damage, so the fastest digest is enough.
    wanted = checksums.enough(expected.digests, sure=ask.only is not None) if expected else ()
    seen = content_scan.sweep(source, anatomy, wanted, ask.note, ask.threads)
    lists = ("problems", "doubts", "causes", "proved")
    known = {name: len(getattr(anatomy, name)) for name in lists}
    for work in anatomy.later:
        work()
    for name in lists:
        getattr(entry, name).extend(getattr(anatomy, name)[known[name] :])
    if seen.bad_spans:
        entry.refute(f"the CRC of {some(seen.bad_spans)} does not match: the bytes have changed since the save")
    elif seen.spans:
        entry.proved.append(f"the CRCs of {seen.spans:,} members match")
    recorded = expected.digests if expected else {}
    compared = [n for n in recorded if n in seen.digests]
    wrong = [n for n in compared if seen.digests[n] != recorded[n]]
    if wrong:
        entry.refute(f"its {wrong[0]} differs from the manifest: the bytes are not the ones that were saved")
    elif compared:
        entry.sealed = True
        entry.proved.append(f"its {compared[0]} matches the manifest")
    elif recorded:
        entry.doubt("none of its digests in the manifest can be computed here", Cause.UNSEALED)
    elif not seen.spans:
        entry.unproved.append(NO_SEAL)
    for marks in seen.marks if not entry.sealed else ():
        for line in pages.suspicions(source, anatomy, marks, seen.zero):
            entry.doubt(line, Cause.UNSEALED)
    if seen.scanned:
        _values(source, entry, anatomy, seen)


def _values(source: Source, entry: Entry, anatomy: Anatomy, seen: content_scan.ScanResult) -> None:
    """Report tensors that contain NaN or infinity, except masks and counters, and weights that look suspicious."""
    bad: list[str] = []
    before = len(entry.warnings)
    for tensor in seen.strange[:200]:
        odd = nonfinite.count_nonfinite(source, tensor, anatomy.big_endian)
        if odd is None:
            bad.append(f"{short(tensor.name, 80)} (NaN or infinity)")
        elif odd.masklike:
            entry.warnings.append(f"{short(tensor.name, 80)} contains {odd}: probably a mask or counter")
        elif odd.nan or odd.inf:
            bad.append(f"{short(tensor.name, 80)} ({odd})")
    if bad and entry.format == "numpy":
        anatomy.not_finite += bad
    elif bad:
        entry.refute(f"not finite: {some(bad)}", Cause.NOT_FINITE)
    elif len(seen.strange) > 200:
        entry.doubt(f"{len(seen.strange):,} tensors may contain NaN or infinity; 200 were examined", Cause.LIMIT)
    else:
        apart = ", except in masks and counters" if len(entry.warnings) > before else ""
        entry.proved.append(f"every value of {seen.scanned:,} floating-point tensors is finite{apart}")
    entry.warnings += heuristics.suspicions(source, anatomy, seen.zero)


def reader(name: str, head: bytes) -> Any | None:
    """Return the format that matches a file's name and first bytes, or None. Built-in formats take precedence."""
    return next((p for _, p in FORMATS.usable() if p.claims(name, head)), None)
