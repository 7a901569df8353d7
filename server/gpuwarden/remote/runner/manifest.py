"""List the files in the declared outputs, optionally with digests."""

from __future__ import annotations

import os
import stat
import time
from typing import Callable

from gpuwarden.remote.runner.files import stamp
from gpuwarden.remote.runner.output_json import reply
from gpuwarden.remote.runner.parts import PartsDigest, part_size
from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.safe_open import SafeOpener
from gpuwarden.remote.runner.seals import seals
from gpuwarden.remote.runner.stream import MAX_MEMBER, pack, put_out

MAX_FILES = 200_000
MAX_SKIPPED = 1000
ROWS = 1000
SEAL = ("sha256", "sealed_at", "mac", "part_size", "parts_sha256")


class Listing:
    """Lists each regular file in the declared outputs once. Other entries are listed in `skipped`, with the reason."""

    def __init__(
        self, folder: str, mapping: PathMapping, emit: Callable[[Json], None], digests: bool, parts: bool = False
    ) -> None:
        self.folder, self.mapping, self.emit, self.digests, self.parts = folder, mapping, emit, digests, parts
        self.missing: list[str] = []
        self.skipped: list[Json] = []
        self.seen: dict[str, bool] = {}
        self.opener = SafeOpener()
        self.seals = seals(folder)
        self.more_skipped = 0

    def skip(self, shown: str, why: str) -> None:
        """Record an entry that is omitted from the manifest."""
        if len(self.skipped) < MAX_SKIPPED:
            self.skipped.append({"path": printable(shown), "why": why})
        else:
            self.more_skipped += 1

    def add(self, declared: str) -> None:
        """Add one declared output: a file, or all files in a folder."""
        top, bound = self.mapping.locate(self.folder, declared)
        real = os.path.realpath(top)
        if not os.path.lexists(real):
            self.missing.append(declared)
        elif not inside(real, bound) or (declared.startswith("/") and real == bound):
            link = real != os.path.normpath(top)
            self.skip(declared, "a link that points outside its folder" if link else "outside the shared folders")
        elif os.path.isdir(real):
            self.walk(self.shown(declared, real), real)
        else:
            self.file(self.shown(declared, real), real)

    def shown(self, declared: str, real: str) -> str:
        """Return the path to show. For an absolute output, return its real path, because a teardown deletes the link's
        target.
        """
        if not declared.startswith("/"):
            return declared.rstrip("/")
        return self.mapping.shown(real)

    def walk(self, declared: str, top: str) -> None:
        """Add all entries of a folder in a stable order. Links are not followed."""

        def unreadable(error: OSError) -> None:
            self.skip(str(error.filename), f"can't be read: {error.strerror}")

        for path, folders, files in os.walk(top, onerror=unreadable, followlinks=False):
            folders.sort()
            shown = declared + path[len(top) :]
            for name in sorted(files) + [f for f in folders if os.path.islink(path + "/" + f)]:
                self.entry(shown + "/" + name, path + "/" + name, top)

    def entry(self, shown: str, path: str, top: str) -> None:
        """Add one entry. Links are accepted only if they point to a file in the same folder."""
        try:
            info = os.lstat(path)
        except OSError as error:
            self.skip(shown, f"can't be read: {error.strerror}")
            return
        if stat.S_ISLNK(info.st_mode):
            real = os.path.realpath(path)
            if not os.path.exists(real):
                self.skip(shown, "a link whose target does not exist")
            elif not inside(real, top):
                self.skip(shown, "a link that points outside its folder")
            elif os.path.isdir(real):
                self.skip(shown, "a link to a folder that is listed separately")
            else:
                self.file(shown, real)
        else:
            self.file(shown, path, info)

    def file(self, shown: str, real: str, info: os.stat_result | None = None) -> None:
        """Add one regular file."""
        if shown in self.seen:
            return
        self.seen[shown] = True
        if len(self.seen) > MAX_FILES:
            raise Problem("bad_request", f"more than {MAX_FILES} output files; declare fewer or smaller outputs")
        try:
            shown.encode("utf-8")
            info = info or os.lstat(real)
            if not stat.S_ISREG(info.st_mode):
                self.skip(shown, "not a regular file")
                return
            row: Json = {"path": shown, **stamp(info)}
            if self.digests:
                row.update(self.hash(real))
                if row["sha256"] is None:
                    self.skip(shown, "it kept changing while it was read")
            sealed = self.seals.get(real)
            if sealed and all(row[k] == sealed[k] for k in stamp(info)):  # the file still matches its seal
                row["seal"] = {k: sealed[k] for k in SEAL if k in sealed}
            self.emit(row)
        except UnicodeEncodeError:
            self.skip(shown, "its name is not UTF-8")
        except OSError as error:
            self.skip(shown, f"can't be read: {error.strerror}")

    def hash(self, real: str) -> Json:
        """Return the size, times and digest of a file. The digest is None if the file changed during all three tries.

        A later check compares the times to detect changes. Only the kernel sets the change time (ctime).
        """
        row: Json = {}
        for _ in range(3):
            row, digests = self.hash_once(real)
            if digests:
                return {**row, **digests}
        return {**row, "sha256": None}

    def hash_once(self, real: str) -> tuple[Json, Json]:
        """Hash a file once. Return its size and times, and its digests (empty if the file changed meanwhile)."""
        import hashlib

        fd = self.opener.open(real)
        try:
            before = os.fstat(fd)
            sha, count, spoke = hashlib.sha256(), 0, time.monotonic()
            step = part_size(before.st_size)
            parts = PartsDigest(step) if self.parts and before.st_size > step else None
            while True:
                block = os.read(fd, 1 << 20)
                if not block or count > before.st_size:
                    break
                sha.update(block)
                if parts:
                    parts.update(block)
                count += len(block)
                if time.monotonic() - spoke > 5:  # report progress to the caller
                    spoke = time.monotonic()
                    self.emit({"progress": count})
            after = os.fstat(fd)
            now = os.lstat(real)
        finally:
            os.close(fd)
        row = stamp(after)
        if not (stamp(before) == row and now.st_ino == after.st_ino and count == row["size"]):
            return row, {}
        more = {"part_size": step, "parts_sha256": parts.hexdigest()} if parts else {}
        return row, {"sha256": sha.hexdigest(), **more}


def list_files(folder: str, request: Json, digests: bool, emit: Callable[[Json], None] | None = None) -> Json:
    """Print the files in the declared outputs, or pass them to `emit`; return a summary."""
    if not os.path.isdir(folder):
        raise Problem("not_found", f"the run folder does not exist: {folder}")
    taken = time.time()
    show = emit or (lambda row: reply(row, now="progress" in row))
    found = Listing(folder, PathMapping(request), show, digests, parts=request.get("parts") is True)
    for path in request.get("paths") or []:
        found.add(path)
    if not os.path.isdir(folder):  # probably unmounted, so the files may still exist
        raise Problem("not_found", f"the run folder disappeared while its files were listed: {folder}")
    return {
        "ok": True, "taken_at": taken, "files": len(found.seen), "missing": found.missing,
        "skipped": found.skipped, "more_skipped": found.more_skipped,
    }  # fmt: skip


def fetch(folder: str, request: Json) -> None:
    """Print the manifest (`ROWS` files per line), an empty line, and a bundle of the small files.

    A file in the bundle is identified by its number in the manifest.
    """
    rows: list[Json] = []

    def emit(row: Json) -> None:
        rows.append(row)
        if len(rows) % ROWS == 0:
            reply(rows[-ROWS:])

    summary = list_files(folder, request, False, emit)
    reply(rows[len(rows) - len(rows) % ROWS :])
    reply(summary)
    put_out(b"\n")
    pack(folder, request, ((number, row["path"]) for number, row in enumerate(rows) if row["size"] <= MAX_MEMBER))
