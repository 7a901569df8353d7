"""Read the list that a job's runner stored in the artifact store, and decide whether that list is final.

The runner signs each list with a key that is not stored on the machine's disks. A signed list that records the end of
the run describes the machine's files at that time. The list is final only if no file can have been written since. This
requires the same attempt, the same outputs, no later start of the machine, and, on a machine that stops itself, a check
right before the stop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.core.errors import BadReply, Unreachable, WardenError
from gpuwarden.core.models import Artifact, Disclosure, Manifest, Observation
from gpuwarden.core.reasons import Code, Reason, because
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import MANIFEST, Store, StoreAddress
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.hub.client import HubConfig
from gpuwarden.hub.store_bucket import BucketReader
from gpuwarden.hub.store_repo import RepoReader
from gpuwarden.ledger.events import JobSubmitted
from gpuwarden.lifecycle.artifacts.seal_keys import job_key
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.self_stopped import started_since
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.timeouts import store_limit
from gpuwarden.remote.launch import observation
from gpuwarden.remote.runner.store_report import report_key, report_mac
from gpuwarden.remote.s3_store import S3Reader

MOST_FILES: Final = 200_000
"""Maximum number of files in a manifest; the runner has the same limit."""
VIEW_S: Final = 10.0
MOST: Final = 2**63 - 1
"""Largest number of bytes or nanoseconds that a file system can represent."""
VIEW_NAMES: Final = 8


class _Lenient(BaseModel):
    """Part of a runner's list; unknown fields are ignored, because a newer runner may write them."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class StoreRow(_Lenient):
    """One file in the store. `gone` means that the file no longer existed on the machine when the list was made.

    `version` is part of the object's name if an earlier list contained another object for the same path.
    """

    path: str = Field(max_length=4096)
    size: int = Field(ge=0, le=MOST)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    mtime_ns: int = Field(default=0, ge=-MOST, le=MOST)
    ctime_ns: int = Field(default=0, ge=-MOST, le=MOST)
    part_size: int | None = Field(default=None, ge=1, le=MOST)
    parts_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    gone: bool = False
    version: str = Field(default="", pattern=r"^[0-9a-f]{0,40}$")

    @property
    def artifact(self) -> Artifact:
        """Return the file as it was on the machine."""
        return Artifact(**self.model_dump(exclude={"gone", "version"}))


class _Skip(_Lenient):
    path: str = Field(max_length=5000)
    why: str = Field(max_length=1000)


class StoreEnd(_Lenient):
    """A run's final report. `look` identifies the last check before a self-stop; empty if there was none."""

    outputs: tuple[str, ...] = Field(max_length=1000)
    status: dict[str, Any]
    missing: tuple[str, ...] = Field(default=(), max_length=1000)
    skipped: tuple[_Skip, ...] = Field(default=(), max_length=1000)
    more_skipped: int = 0
    disclosed: Disclosure
    look: str = Field(default="", max_length=100)


class StoreList(_Lenient):
    """A job's file list, as its runner wrote it to the artifact store."""

    job: str
    taken_at: float = Field(default=0.0, ge=0, lt=1e11)
    files: tuple[StoreRow, ...] = Field(max_length=MOST_FILES)
    end: StoreEnd | None = None
    mac: str = Field(default="", max_length=64)


@dataclass(frozen=True)
class StoreContents:
    """A job's artifact store, as described by its file list. `signed` means that the job's runner wrote that list."""

    address: StoreAddress
    store: Store
    listed: StoreList
    signed: bool

    @property
    def files(self) -> tuple[StoreRow, ...]:
        """Return the files that the machine had when the list was made."""
        return tuple(row for row in self.listed.files if not row.gone)

    @cached_property
    def keys(self) -> dict[str, str]:
        """Return the full name of each object in the list, keyed by file path."""
        return {row.path: self.address.key(self.listed.job, row.path, row.version) for row in self.listed.files}

    @property
    def bytes(self) -> int:
        """Return the total size of `files` in bytes."""
        return sum(row.size for row in self.files)

    @property
    def manifest(self) -> Manifest:
        """Return the list as a manifest of the machine's files."""
        end = self.listed.end
        skipped = [f"{skip.path}: {skip.why}" for skip in end.skipped] if end else []
        skipped += [f"and {end.more_skipped} more"] if end and end.more_skipped else []
        files = tuple(row.artifact for row in self.files)
        missing = end.missing if end else ()
        return Manifest(taken_at=self.listed.taken_at, files=files, missing=missing, skipped=tuple(skipped))


def open_store(ctx: Context, address: StoreAddress) -> Store:
    """Return a reader for the store at an address. Raises NotSupported if its client library is not installed."""
    if address.scheme == "s3":
        return S3Reader(address, ctx.env)
    reader = BucketReader if address.kind == "bucket" else RepoReader
    return reader(address, HubConfig.from_env(ctx.env), ctx.clock)


async def read_store(ctx: Context, job: JobRecord) -> StoreContents | None:
    """Read the list in a job's artifact store; None if the store has no list yet. Raises WardenError if the list can't
    be read.
    """
    address = StoreAddress.parse(job.spec.artifact_store)
    try:
        with anyio.fail_after(store_limit(0)):
            store = open_store(ctx, address)
            content = await store.manifest(address.key(job.id, MANIFEST))
    except TimeoutError:
        raise Unreachable(f"{address} sent no complete response within {store_limit(0):g} s", "Try again.") from None
    if content is None:
        return None
    try:
        listed = StoreList.model_validate_json(content)
    except ValidationError as error:
        text = because(Code.STORE_INVALID, message=f"{error.error_count()} invalid fields").text
        raise BadReply(text, "Ask the user to check the store's contents.") from None
    if listed.job != job.id:
        text = because(Code.STORE_INVALID, message="it belongs to another job").text
        raise BadReply(text, "Ask the user to check the store's contents.")
    key = report_key(job_key(ctx, job.id))
    return StoreContents(
        address, store, listed, bool(listed.mac) and report_mac(json.loads(content), key) == listed.mac
    )


@dataclass(frozen=True)
class StoreView:
    """A summary of the files in a job's artifact store.

    `newest` lists the checkpoints and files that changed last, latest first. `why` is the reason why the store can't be
    read or may lack files.
    """

    address: str
    files: int = 0
    bytes: int = 0
    newest: tuple[str, ...] = ()
    why: str = ""


async def store_view(ctx: Context, job: JobRecord) -> StoreView:
    """Return a summary of a job's artifact store, within `VIEW_S` seconds."""
    try:
        with anyio.fail_after(VIEW_S):
            contents = await read_store(ctx, job)
    except TimeoutError:
        return StoreView(
            job.spec.artifact_store, why=because(Code.STORE_UNREACHABLE, message=f"no response in {VIEW_S:g} s").text
        )
    except WardenError as error:
        return StoreView(job.spec.artifact_store, why=line(error.message, 300))
    if contents is None:
        return StoreView(job.spec.artifact_store, why=because(Code.STORE_EMPTY).text)
    times: dict[str, int] = {}
    for row in contents.files:
        top = "/".join(row.path.split("/")[:-1]) if checkpoint_like(row.path) else row.path
        times[top or row.path] = max(times.get(top, 0), row.mtime_ns)
    newest = sorted(times, key=lambda name: -times[name])[:VIEW_NAMES]
    reason = unsettled(ctx, job, contents)
    return StoreView(
        job.spec.artifact_store, len(contents.files), contents.bytes, tuple(newest), reason.text if reason else ""
    )


def unsettled(ctx: Context, job: JobRecord, contents: StoreContents) -> Reason | None:
    """Return the reason why a store's list may lack files from the job's machine; None if the list is final."""
    end, launched = contents.listed.end, ctx.ledger.last(job.subject, JobSubmitted)
    if not contents.signed:
        return because(Code.STORE_UNSIGNED)
    if end is None or launched is None or end.status.get("attempt") != job.attempt:
        return because(Code.STORE_NO_END)
    if more := [path for path in job.outputs if path not in end.outputs]:
        return because(Code.STORE_OTHER_OUTPUTS, path=more[0])
    if started_since(ctx, job, launched.seq):
        return because(Code.STORE_STARTED_SINCE)
    self_stops = job.handle is not None and job.handle.place.self_stop_order is not None
    return because(Code.STORE_NO_LAST_LOOK) if self_stops and not end.look else None


def reported_end(contents: StoreContents) -> Observation | None:
    """Return an observation of how the job ended, according to a store's list; None if the list has no final report."""
    return observation(contents.listed.end.status | {"now": contents.listed.taken_at}) if contents.listed.end else None
