"""Upload a job's outputs to its artifact store during the job and afterwards, until all are uploaded.

While the job runs, only sealed checkpoints are uploaded, one at a time; the manifest is written after the files that it
lists. After the job's end, the other files are uploaded. The process never deletes anything in the store, and never
replaces an object that the store's manifest may list: a file that is saved again is first stored as another version.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from typing import Any, Iterable, NoReturn

from gpuwarden.remote.runner.files import read_small, stamp, write_atomic
from gpuwarden.remote.runner.manifest import Listing
from gpuwarden.remote.runner.path_mapping import PathMapping, inside
from gpuwarden.remote.runner.process import hide_memory
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.redact import Redactor
from gpuwarden.remote.runner.seals import seals
from gpuwarden.remote.runner.start import take_lock
from gpuwarden.remote.runner.status import read_status
from gpuwarden.remote.runner.store_clients import CLIENTS, Changed, open_store
from gpuwarden.remote.runner.store_report import GOES_ON, end_of_run, last_of, latest_request, report_mac, sign_report
from gpuwarden.remote.runner.upload_process import UPLOAD_REPORT, secret_keys

UPLOAD_BYTES_S = 50 << 20  # applies while the job runs; afterwards the rate is not limited
UPLOAD_EVERY_S = 10.0
LONGEST_PAUSE_S = 300.0
GIVE_UP_S = 86400.0  # after the job's end
ASKED_EVERY_S = 1.0
AGAIN_EVERY_S = 10.0
STORE_LIST = "gpuwarden-manifest.json"
VERSIONS = "gpuwarden-versions"  # in the store: files whose usual names the manifest already uses
SENT = "keep-sent.json"
STORE_FIELDS = ("path", "size", "mtime_ns", "ctime_ns", "sha256", "part_size", "parts_sha256", "sealed_at", "mac")


def upload(folder: str, scheme: str, how: str) -> None:
    """Upload if `how` is `ready`; otherwise restart this process with a Python that can import the store's client."""
    folder = os.path.realpath(folder)
    if how != "ready":
        become_client(folder, scheme, how == "boxed")
    os.nice(19)
    order = json.loads(read_order())
    if not order.get("root"):  # a rehearsal must be able to read its processes' environments
        hide_memory()
    ArtifactUploader(folder, order).run()


def read_order() -> bytes:
    """Return the first line of stdin. Read it byte by byte, so that nothing after the line is consumed."""
    line = bytearray()
    while len(line) < 1 << 20:
        byte = os.read(0, 1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return bytes(line)


def write_upload_report(folder: str, state: str, error: str = "", look: str = "") -> None:
    """Write the upload's state to the run folder. Exit if the folder is missing."""
    try:
        text = json.dumps({"state": state, "error": error, "at": time.time(), "pid": os.getpid(), "look": look})
        write_atomic(folder + "/" + UPLOAD_REPORT, text.encode("ascii"))
    except FileNotFoundError:
        sys.exit(3)
    except OSError:
        pass  # a full disk must not stop the upload


# -- the client


def become_client(folder: str, scheme: str, boxed: bool) -> NoReturn:
    """Restart this process with a Python that can import the store's client.

    Retries, because the job may install the client later. The order on stdin is left unread for the new process.
    """
    module = CLIENTS[scheme]
    while True:
        over = input_closed(0.0)
        for python in pythons(folder, module, boxed):
            if has_module(python, module):
                os.execv(python[0], [*python, "-I", os.path.abspath(sys.argv[0]), "keep", folder, scheme, "ready"])  # noqa: S606
        write_upload_report(
            folder, "no_client",
            f"nothing is uploaded to the artifact store: no Python on the machine can import {module}. Install it for "
            f"the machine's python3 or in the job's environment, or put uv on the PATH",
        )  # fmt: skip
        if over:
            sys.exit(4)
        input_closed(30.0)


def input_closed(seconds: float) -> bool:
    """Wait up to `seconds` for the other end of stdin to be closed; return whether it is closed. Reads nothing."""
    import select

    poller = select.poll()
    poller.register(0, select.POLLHUP)
    return bool(poller.poll(seconds * 1000))


def pythons(folder: str, module: str, boxed: bool) -> list[list[str]]:
    """Return commands for the Pythons that may have the client: the job's Python first, uv's temporary one last.

    A Python that a sandboxed job may have modified is not run outside the sandbox.
    """
    import shutil

    if boxed:
        return [[sys.executable]]
    own = [os.path.join(folder, "work", name, "bin", "python") for name in (".venv", "venv")] + [sys.executable]
    named = [path for path in (shutil.which("python3"), shutil.which("python")) if path]
    found = [[path] for path in dict.fromkeys([*own, *named]) if os.access(path, os.X_OK)]
    uv = shutil.which("uv")
    return [*found, [uv, "run", "--no-project", "--quiet", "--with", module, "python"]] if uv else found


def has_module(python: list[str], module: str) -> bool:
    """Return whether a Python interpreter can import a module."""
    import subprocess

    try:
        argv = [*python, "-I", "-c", "import " + module]
        with open(os.devnull, "r+b") as null:
            return subprocess.call(argv, stdin=null, stdout=null, stderr=null, cwd="/", timeout=120) == 0
    except (OSError, subprocess.SubprocessError):
        return False


# -- the upload


class ArtifactUploader:
    """Uploads files. `rows` maps paths to the uploaded files, in the manifest's format.

    `listed_objects` contains the SHA-256 of each object that the manifest in the store may list.
    """

    def __init__(self, folder: str, order: Json) -> None:
        self.folder, self.order, self.where = folder, order, order["keep"]
        self.mapping = PathMapping(order)
        self.redactor = Redactor(secret_keys(order["keys"]))
        self.store: Any = None
        self.rate = float(order.get("keep_bytes_s") or UPLOAD_BYTES_S)
        self.every = float(order.get("keep_every_s") or UPLOAD_EVERY_S)
        self.rows: dict[str, Json] = {}
        self.committed: list[Json] = []  # `rows` of the last manifest that was written
        self.listed_objects: dict[str, str] = {}
        self.unsure = False  # true if the last commit failed or its reply was lost
        self.uploads: dict[str, str] = {}
        self.acknowledged: dict[tuple[str, str], int] = {}
        self.final = self.listed_all = False
        self.claims = False  # true if the store's manifest may report how the run ended
        self.free_at = 0.0
        self.key = str(order.get("key") or "")
        self.look = self.asked = ""
        self.end: Json | None = None
        # Another machine, or a process whose record is unusable, may have written a manifest that this process can't
        # read. Versions uploaded before this process's first manifest must be ones that no other process has used.
        other = order.get("recovers") or (order.get("attempt") or 1) > 1 or os.path.exists(folder + "/" + SENT)
        self.first = os.urandom(4).hex() if other else ""
        try:
            record = json.loads(read_small(folder + "/" + SENT, 256 << 20))
            ours = not self.key or record["mac"] == report_mac(record, self.key)  # the job may write to this folder
            if record["keep"] == self.where and ours:
                rows, uploads = {row["path"]: row for row in record["files"]}, dict(record["uploads"])
                self.listed_objects = {**objects(record["files"]), **record.get("maybe_listed", {})}
                self.first = str(record.get("first", ""))
                self.rows, self.uploads, self.committed = rows, uploads, record["files"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # all files are uploaded again

    def run(self) -> None:
        """Upload until the job has ended and all files have been uploaded. The pauses get longer after failures."""
        lock = take_lock(self.folder, "keep.lock")
        while lock < 0:  # an earlier attempt's upload has not ended yet
            time.sleep(1.0)
            lock = take_lock(self.folder, "keep.lock")
        pause, over, began, done = self.every, input_closed(0.0), time.monotonic(), False
        while not (over and time.monotonic() - began > GIVE_UP_S):
            try:
                self.final = over and self.job_ended()
                done = self.turn()
                write_upload_report(self.folder, "done" if self.final and done else "waiting")
                if over and (done or not self.final):
                    break
                pause = min(pause * 2, LONGEST_PAUSE_S) if over else self.every
            except Exception as error:  # any error from the client libraries; the next turn tries again
                self.store = None
                text = client_error(error, self.redactor)
                write_upload_report(self.folder, "failed", f"the upload to the artifact store failed: {text}")
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if over:
                time.sleep(pause)
            elif input_closed(pause):
                over, began, pause = True, time.monotonic(), self.every
        if done and self.final and self.order.get("self_stops"):
            os.close(lock)
            self.await_self_stop(began)

    def await_self_stop(self, began: float) -> None:
        """Update the store's manifest with the final state when the machine is about to stop itself."""
        again = False
        while last_of(self.folder, self.order.get("attempt")) and (again or time.monotonic() - began < GIVE_UP_S):
            asked = latest_request(self.folder)
            if asked != self.asked or again:
                self.asked, state, text = asked, "failed", ""
                self.look = "" if asked.startswith(GOES_ON) else asked
                for _ in range(2):  # the connection may have been closed since its last use
                    try:
                        state, text = "done" if self.turn() else "waiting", ""
                        break
                    except Exception as error:  # the machine still stops, but without a final manifest
                        self.store, text = None, client_error(error, self.redactor)
                write_upload_report(self.folder, state, text, asked)
                # Repeat, because the machine kept running, but the store's manifest still reports that it is stopping.
                again = state == "failed" and not self.look
            time.sleep(AGAIN_EVERY_S if again else ASKED_EVERY_S)

    def job_ended(self) -> bool:
        """Return whether the job has ended, according to its status."""
        status = read_status(self.folder)
        return status is not None and status["state"] != "running"

    def turn(self) -> bool:
        """Upload the files that are due. Return whether all of them are in the store."""
        listing, listed = self.listed()
        complete, groups = True, self.sealed(listed)
        if self.final:
            groups.append(listed)
        for number, group in enumerate(groups, 1):
            self.store = self.store or open_store(self.where, self.order["keys"], self.uploads, self.remember)
            due = [row for row in group if not self.has(row)]
            sent = [row for row in (self.sent(row) for row in due) if row]
            complete = complete and len(sent) == len(due)
            if len(sent) == len(due) or self.final:
                before = dict(self.rows)
                self.rows.update({row["path"]: row for row in sent})
                last = self.final and number == len(groups)
                end = end_of_run(self.folder, self.order, listing, self.look) if last and complete else None
                if end is not None and not self.is_all(listing, listed):
                    end, complete = None, False
                if sent or self.unsure or (last and not self.listed_all) or (last and self.says_more(end)):
                    try:
                        self.write_manifest(listed, end)
                    except Exception:
                        if getattr(self.store, "late", False):
                            self.rows = before  # the failed commit contained these files, so they are sent again
                        raise
                    self.listed_all = last
            else:
                self.store = None  # the checkpoint has changed, so the list of its uploaded files is out of date
        return complete

    def says_more(self, end: Json | None) -> bool:
        """Return whether `end` differs from the run's outcome in the store's manifest; None stands for no outcome.

        Disclosed processes are not compared, because unrelated processes start and end all the time.
        """
        if end is None:
            return self.claims
        before = self.end or {}
        return any(end[name] != before.get(name) for name in end if name != "disclosed")

    def is_all(self, listing: Listing, listed: list[Json]) -> bool:
        """Return whether all files are in the store and unchanged since the listing, which may be hours old."""
        now, there = self.listed()
        same = (now.missing, now.skipped, len(there)) == (listing.missing, listing.skipped, len(listed))
        return same and all(self.has(row) for row in there)

    def listed(self) -> tuple[Listing, list[Json]]:
        """List the declared files. Files that the listing skips are not uploaded."""
        found: list[Json] = []
        listing = Listing(self.folder, self.mapping, found.append, False)
        for path in self.order.get("outputs") or []:
            listing.add(path)
        return listing, found

    def sealed(self, listed: list[Json]) -> list[list[Json]]:
        """Return the sealed checkpoints whose files are all present and unchanged, oldest first."""
        sizes: dict[float, int] = {}
        for seal in seals(self.folder).values():
            sizes[seal["sealed_at"]] = sizes.get(seal["sealed_at"], 0) + 1
        groups: dict[float, list[Json]] = {}
        for row in listed:
            if "seal" in row:
                groups.setdefault(row["seal"]["sealed_at"], []).append(row)
        return [groups[at] for at in sorted(groups) if len(groups[at]) == sizes[at]]

    def has(self, row: Json) -> bool:
        """Return whether this version of the file has been uploaded, according to `rows`."""
        known = self.rows.get(row["path"])
        return known is not None and stamped(row, known)

    def sent(self, row: Json) -> Json | None:
        """Upload one file. Return its row for the manifest, or None if the file has changed."""
        listing = Listing(self.folder, self.mapping, lambda row: None, True, parts=True)
        place, bound = self.mapping.locate(self.folder, row["path"])
        real = os.path.realpath(place)
        if not inside(real, os.path.realpath(bound)):
            return None  # a folder in the path was replaced by a link
        try:
            known = {**row, **(row.get("seal") or listing.hash(real))}
            fd = listing.opener.open(real)
        except OSError:
            return None
        finally:
            listing.opener.close()

        def taken(count: int) -> None:
            self.acknowledge(known, count)
            self.pace(count)

        try:
            if not known["sha256"] or not stamped(row, known) or not stamped(row, stamp(os.fstat(fd))):
                return None
            version = self.version(known)
            self.store.put(self.order["prefix"] + object_name(row["path"], version), fd, known, taken)
            self.acknowledge(known, known["size"])
            fields = {key: known[key] for key in STORE_FIELDS if known.get(key) is not None}
            return {**fields, "version": version} if version else fields
        except Changed:
            return None
        finally:
            os.close(fd)

    def version(self, row: Json) -> str:
        """Return the first version of a file that the store's manifest does not list with other content."""
        if getattr(self.store, "atomic", False):
            return ""
        for number in itertools.count():
            version = f"{self.first}{number or ''}"
            listed = self.listed_objects.get(object_name(row["path"], version))
            if listed in (None, row["sha256"]):
                break
        return version

    def write_manifest(self, listed: list[Json], end: Json | None) -> None:
        """Write the manifest of all uploaded files to the store, then record the uploads in the run folder.

        `end` is given once the job has ended and all its files are in the store. A file removed from the machine stays
        in the store and is marked `gone`.
        """
        there = {row["path"] for row in listed}
        files = [self.rows[path] if path in there else {**self.rows[path], "gone": True} for path in sorted(self.rows)]
        body = {"schema": 1, "job": self.order["token"], "taken_at": time.time(), "final": self.final, "files": files}
        if end is not None:
            body["end"] = end
        text = json.dumps(sign_report(body, self.key), sort_keys=True)
        new = objects(self.rows.values())
        self.claims = self.claims or end is not None  # a commit without a reply may have succeeded
        self.unsure, self.listed_objects = True, {**self.listed_objects, **new}
        self.remember()  # a later process must not replace objects listed in the old or new manifest
        self.store.commit(self.order["prefix"] + STORE_LIST, text.encode("ascii"))
        self.unsure, self.listed_objects, self.first = False, new, ""
        self.end, self.claims, self.committed = end, end is not None, list(self.rows.values())
        self.remember()

    def remember(self) -> None:
        """Record the uploaded files and the uploads in progress, for a later process."""
        committed = objects(self.committed)
        more = {name: digest for name, digest in self.listed_objects.items() if name not in committed}
        record = {"keep": self.where, "files": self.committed, "uploads": self.uploads}
        record.update(maybe_listed=more, first=self.first)
        write_atomic(self.folder + "/" + SENT, json.dumps(sign_report(record, self.key)).encode("ascii"))

    def acknowledge(self, row: Json, count: int) -> None:
        """Touch the lock file when new bytes are uploaded, to delay a self-stop. Resent bytes don't count."""
        file = row["path"], row["sha256"]
        before = self.acknowledged.get(file, 0)
        self.acknowledged[file] = before + count
        try:
            if before < row["size"]:
                os.utime(self.folder + "/keep.lock")
        except OSError:
            pass  # if the machine stops too early, the files are still on its disk

    def pace(self, count: int) -> None:
        """Limit the upload rate to `rate` while the job runs."""
        if self.final:
            return
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + count / self.rate
        if self.free_at > now and input_closed(self.free_at - now):
            self.free_at = now


def object_name(path: str, version: str) -> str:
    """Return the name of a file's object in the store, relative to the job's prefix, as `StoreAddress.key` does."""
    below = "machine/" + path.lstrip("/") if path.startswith("/") else path
    return f"{VERSIONS}/{version}/{below}" if version else below


def objects(rows: Iterable[Json]) -> dict[str, str]:
    """Return the SHA-256 of each object that a manifest with these rows lists, by object name."""
    return {object_name(row["path"], row.get("version", "")): row["sha256"] for row in rows}


def stamped(row: Json, other: Json) -> bool:
    """Return whether two descriptions of a file have the same size and times."""
    return all(row[key] == other[key] for key in ("size", "mtime_ns", "ctime_ns"))


def client_error(error: BaseException, redactor: Redactor) -> str:
    """Return a client's error with the store's error code, redacted and then shortened.

    The text of a ValueError is omitted, because HTTP clients may quote an invalid header, which contains the key.
    """
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code", "") if isinstance(answer, dict) else getattr(answer, "status_code", "")
    text = "" if isinstance(error, ValueError) else redactor.text(str(error))
    text = " ".join(re.sub(r"//[^/\s]*@", "//", text).split())[:160]
    return f"{type(error).__name__}{f' ({redactor.text(str(code))[:40]})' if code else ''}{': ' if text else ''}{text}"
