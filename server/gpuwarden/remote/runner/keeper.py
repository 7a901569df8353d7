"""The process that uploads a job's outputs to its artifact store, beside the job and until they are all there.

While the job runs, only what the sealer found whole is uploaded, a checkpoint at a time; the manifest is written after
the files that it lists. When nobody saves any more, the rest follows. Nothing is ever deleted in the store.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any, NoReturn

from gpuwarden.remote.runner.files import read_small, stamp, write_atomic
from gpuwarden.remote.runner.keep import KEEP_REPORT, secret_keys
from gpuwarden.remote.runner.keep_clients import CLIENTS, Changed, open_store
from gpuwarden.remote.runner.keep_report import GOES_ON, asked_look, end_of_run, keep_mac, last_of, sign_kept
from gpuwarden.remote.runner.manifest import Listing
from gpuwarden.remote.runner.path_mapping import PathMapping, inside
from gpuwarden.remote.runner.process import hide_memory
from gpuwarden.remote.runner.protocol import Json
from gpuwarden.remote.runner.redact import Redactor
from gpuwarden.remote.runner.seals import seals
from gpuwarden.remote.runner.start import take_lock
from gpuwarden.remote.runner.status import read_status

KEEP_BYTES_S = 50 << 20  # while the job runs; afterwards the machine has nothing better to do
KEEP_EVERY_S = 10.0
LONGEST_PAUSE_S = 300.0
GIVE_UP_S = 86400.0  # after the job's end
ASKED_EVERY_S = 1.0
AGAIN_EVERY_S = 10.0
KEPT_LIST = "gpuwarden-manifest.json"
SENT = "keep-sent.json"
KEPT_FIELDS = ("path", "size", "mtime_ns", "ctime_ns", "sha256", "part_size", "parts_sha256", "sealed_at", "mac")


def keep(folder: str, scheme: str, how: str) -> None:
    """Become a Python that has the store's client; then, where `how` is `ready`, upload."""
    folder = os.path.realpath(folder)
    if how != "ready":
        become_client(folder, scheme, how == "boxed")
    os.nice(19)
    order = json.loads(read_order())
    if not order.get("root"):  # a rehearsal finds its processes by their environment
        hide_memory()
    Keeper(folder, order).run()


def read_order() -> bytes:
    """Return the first line of stdin, read byte by byte."""
    line = bytearray()
    while len(line) < 1 << 20:
        byte = os.read(0, 1)
        if byte in (b"", b"\n"):
            break
        line += byte
    return bytes(line)


def report_keep(folder: str, state: str, error: str = "", look: str = "") -> None:
    """Leave the upload's state in the run folder. Ends the process where that folder is gone."""
    try:
        text = json.dumps({"state": state, "error": error, "at": time.time(), "pid": os.getpid(), "look": look})
        write_atomic(folder + "/" + KEEP_REPORT, text.encode("ascii"))
    except FileNotFoundError:
        sys.exit(3)
    except OSError:
        pass  # a full disk stops no upload


# -- the client


def become_client(folder: str, scheme: str, boxed: bool) -> NoReturn:
    """Replace this process by one of a Python that has the store's client, which the job may install meanwhile.

    The order stays unread on stdin, for the process that this one becomes.
    """
    module = CLIENTS[scheme]
    while True:
        over = input_closed(0.0)
        for python in pythons(folder, module, boxed):
            if has_module(python, module):
                os.execv(python[0], [*python, "-I", os.path.abspath(sys.argv[0]), "keep", folder, scheme, "ready"])  # noqa: S606
        report_keep(
            folder, "no_client",
            f"nothing is uploaded to the artifact store: no Python on the machine can import {module}. Install it for "
            f"python3 there, or among the packages of the job's own environment, or put uv on the PATH",
        )  # fmt: skip
        if over:
            sys.exit(4)
        input_closed(30.0)


def input_closed(seconds: float) -> bool:
    """Wait until the other end of stdin is closed, at most so long. Reads nothing."""
    import select

    poller = select.poll()
    poller.register(0, select.POLLHUP)
    return bool(poller.poll(seconds * 1000))


def pythons(folder: str, module: str, boxed: bool) -> list[list[str]]:
    """Return how to start each Python that may have the client: the job's own first, one that uv makes last.

    What a sandboxed job wrote is not run outside of its sandbox.
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
    """Return whether a Python can import a module."""
    import subprocess

    try:
        argv = [*python, "-I", "-c", "import " + module]
        with open(os.devnull, "r+b") as null:
            return subprocess.call(argv, stdin=null, stdout=null, stderr=null, cwd="/", timeout=120) == 0
    except (OSError, subprocess.SubprocessError):
        return False


# -- the upload


class Keeper:
    """Uploads what is due. `rows` are the files that are in the store, by path, as the next manifest lists them."""

    def __init__(self, folder: str, order: Json) -> None:
        self.folder, self.order, self.where = folder, order, order["keep"]
        self.mapping = PathMapping(order)
        self.redactor = Redactor(secret_keys(order["keys"]))
        self.store: Any = None
        self.rate = float(order.get("keep_bytes_s") or KEEP_BYTES_S)
        self.every = float(order.get("keep_every_s") or KEEP_EVERY_S)
        self.rows: dict[str, Json] = {}
        self.uploads: dict[str, str] = {}
        self.acknowledged: dict[tuple[str, str], int] = {}
        self.final = self.listed_all = False
        self.claims = False  # the store may have a list with the end of the run
        self.free_at = 0.0
        self.key = str(order.get("key") or "")
        self.look = self.asked = ""
        self.end: Json | None = None
        try:
            record = json.loads(read_small(folder + "/" + SENT, 256 << 20))
            ours = not self.key or record["mac"] == keep_mac(record, self.key)  # the job may write here
            if record["keep"] == self.where and ours:
                self.rows = {row["path"]: row for row in record["files"]}
                self.uploads = dict(record["uploads"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self.rows, self.uploads = {}, {}  # everything is uploaded again

    def run(self) -> None:
        """Upload until nobody saves any more and everything is there, with longer and longer pauses after failures."""
        lock = take_lock(self.folder, "keep.lock")
        while lock < 0:  # an earlier attempt's upload is ending
            time.sleep(1.0)
            lock = take_lock(self.folder, "keep.lock")
        pause, over, began, done = self.every, input_closed(0.0), time.monotonic(), False
        while not (over and time.monotonic() - began > GIVE_UP_S):
            try:
                self.final = over and self.job_ended()
                done = self.turn()
                report_keep(self.folder, "done" if self.final and done else "waiting")
                if over and (done or not self.final):
                    break
                pause = min(pause * 2, LONGEST_PAUSE_S) if over else self.every
            except Exception as error:  # of three libraries: whatever it is, the next turn tries again
                self.store = None
                text = client_error(error, self.redactor)
                report_keep(self.folder, "failed", f"the upload to the artifact store failed: {text}")
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if over:
                time.sleep(pause)
            elif input_closed(pause):
                over, began, pause = True, time.monotonic(), self.every
        if done and self.final and self.order.get("parks"):
            os.close(lock)
            self.await_park(began)

    def await_park(self, began: float) -> None:
        """Look again when the machine is about to stop itself, so that the store's list is the last word about it."""
        again = False
        while last_of(self.folder, self.order.get("attempt")) and (again or time.monotonic() - began < GIVE_UP_S):
            asked = asked_look(self.folder)
            if asked != self.asked or again:
                self.asked, state, text = asked, "failed", ""
                self.look = "" if asked.startswith(GOES_ON) else asked
                for _ in range(2):  # a connection from hours ago may be dead
                    try:
                        state, text = "done" if self.turn() else "waiting", ""
                        break
                    except Exception as error:  # the machine stops all the same, and the store has no last word
                        self.store, text = None, client_error(error, self.redactor)
                report_keep(self.folder, state, text, asked)
                # the machine goes on, and the store says that nothing was written to it since
                again = state == "failed" and not self.look
            time.sleep(AGAIN_EVERY_S if again else ASKED_EVERY_S)

    def job_ended(self) -> bool:
        """Return whether the job has ended; its supervisor may have died before it."""
        status = read_status(self.folder)
        return status is not None and status["state"] != "running"

    def turn(self) -> bool:
        """Upload everything that is due now. Return whether everything that is declared is in the store."""
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
                if sent or (last and not self.listed_all) or (last and self.says_more(end)):
                    try:
                        self.write_manifest(listed, end)
                    except Exception:
                        if getattr(self.store, "late", False):
                            self.rows = before  # what was collected is lost with the commit, and is sent again
                        raise
                    self.listed_all = last
            else:
                self.store = None  # what was sent of a checkpoint that is not whole any more is not listed
        return complete

    def says_more(self, end: Json | None) -> bool:
        """Return whether the store's list lacks what is known of the end, or has one that is not true any more.

        Strangers' processes come and go.
        """
        if end is None:
            return self.claims
        before = self.end or {}
        return any(end[name] != before.get(name) for name in end if name != "disclosed")

    def is_all(self, listing: Listing, listed: list[Json]) -> bool:
        """Return whether the machine still has what was listed, all of it in the store: an upload may take hours."""
        now, there = self.listed()
        same = (now.missing, now.skipped, len(there)) == (listing.missing, listing.skipped, len(listed))
        return same and all(self.has(row) for row in there)

    def listed(self) -> tuple[Listing, list[Json]]:
        """Return the declared files. What the listing skips is never uploaded; it names that."""
        found: list[Json] = []
        listing = Listing(self.folder, self.mapping, found.append, False)
        for path in self.order.get("outputs") or []:
            listing.add(path)
        return listing, found

    def sealed(self, listed: list[Json]) -> list[list[Json]]:
        """Return the checkpoints that were sealed and that are there as a whole, the oldest first."""
        sizes: dict[float, int] = {}
        for seal in seals(self.folder).values():
            sizes[seal["sealed_at"]] = sizes.get(seal["sealed_at"], 0) + 1
        groups: dict[float, list[Json]] = {}
        for row in listed:
            if "seal" in row:
                groups.setdefault(row["seal"]["sealed_at"], []).append(row)
        return [groups[at] for at in sorted(groups) if len(groups[at]) == sizes[at]]

    def has(self, row: Json) -> bool:
        """Return whether exactly this file is in the store by this process's own record."""
        known = self.rows.get(row["path"])
        return known is not None and stamped(row, known)

    def sent(self, row: Json) -> Json | None:
        """Upload one file. Return its row of the manifest, None where it changed meanwhile."""
        listing = Listing(self.folder, self.mapping, lambda row: None, True, parts=True)
        place, bound = self.mapping.locate(self.folder, row["path"])
        real = os.path.realpath(place)
        if not inside(real, os.path.realpath(bound)):
            return None  # a folder of the path was replaced by a link since it was listed
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
            below = "machine/" + row["path"].lstrip("/") if row["path"].startswith("/") else row["path"]
            self.store.put(self.order["prefix"] + below, fd, known, taken)
            self.acknowledge(known, known["size"])
            return {key: known[key] for key in KEPT_FIELDS if known.get(key) is not None}
        except Changed:
            return None
        finally:
            os.close(fd)

    def write_manifest(self, listed: list[Json], end: Json | None) -> None:
        """Commit the list of everything that is in the store, then remember it here.

        `end` is there once the job has ended and everything that it left is in the store. A file that was removed on
        the machine stays in the store and is marked as `gone`.
        """
        there = {row["path"] for row in listed}
        files = [self.rows[path] if path in there else {**self.rows[path], "gone": True} for path in sorted(self.rows)]
        body = {"schema": 1, "job": self.order["token"], "taken_at": time.time(), "final": self.final, "files": files}
        if end is not None:
            body["end"] = end
        text = json.dumps(sign_kept(body, self.key), sort_keys=True)
        self.claims = self.claims or end is not None  # a commit whose answer is lost may be in the store
        self.store.commit(self.order["prefix"] + KEPT_LIST, text.encode("ascii"))
        self.end, self.claims = end, end is not None
        self.remember()

    def remember(self) -> None:
        """Write down what is in the store and which uploads are under way, for a process that goes on."""
        record = {"keep": self.where, "files": list(self.rows.values()), "uploads": self.uploads}
        write_atomic(self.folder + "/" + SENT, json.dumps(sign_kept(record, self.key)).encode("ascii"))

    def acknowledge(self, row: Json, count: int) -> None:
        """Touch the lock where the store has more of a file than ever. What is sent again keeps no machine on."""
        file = row["path"], row["sha256"]
        before = self.acknowledged.get(file, 0)
        self.acknowledged[file] = before + count
        try:
            if before < row["size"]:
                os.utime(self.folder + "/keep.lock")
        except OSError:
            pass  # a machine that is stopped too early keeps its files

    def pace(self, count: int) -> None:
        """Wait as long as the sent bytes take at the allowed rate, while the job runs."""
        if self.final:
            return
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + count / self.rate
        if self.free_at > now and input_closed(self.free_at - now):
            self.free_at = now


def stamped(row: Json, other: Json) -> bool:
    """Return whether two descriptions of a file have the same size and times."""
    return all(row[key] == other[key] for key in ("size", "mtime_ns", "ctime_ns"))


def client_error(error: BaseException, redactor: Redactor) -> str:
    """Return an error of a client with the code that the store gave, redacted and then cut.

    The text of a ValueError is left out: HTTP clients quote a header that they refuse.
    """
    answer = getattr(error, "response", None)
    code = answer.get("Error", {}).get("Code", "") if isinstance(answer, dict) else getattr(answer, "status_code", "")
    text = "" if isinstance(error, ValueError) else redactor.text(str(error))
    text = " ".join(re.sub(r"//[^/\s]*@", "//", text).split())[:160]
    return f"{type(error).__name__}{f' ({redactor.text(str(code))[:40]})' if code else ''}{': ' if text else ''}{text}"
