"""Fixtures for jobs whose checkpoints are in an artifact store."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from gpuwarden.core.errors import Unreachable
from gpuwarden.core.store_address import MANIFEST, StoreAddress, StoredFile
from gpuwarden.lifecycle.artifacts import store_contents
from gpuwarden.lifecycle.artifacts.pull import PullResult
from gpuwarden.lifecycle.artifacts.seal_keys import job_key
from gpuwarden.remote.runner.store_report import report_key, sign_report
from pretend_machines import Processes
from self_stop_kit import SelfStopHouse
from store_kit import BUCKET

KEEP = f"s3://{BUCKET}/team"
MODEL = "out/checkpoint-10/model.safetensors"
FILES = {MODEL: b"weights " * 40_000, "out/log.txt": b"done", "out/empty": b""}


class Shelf:
    """An in-memory artifact store whose contents and faults are set by the test."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.denied = self.silent = False
        self.cut_at: int | None = None
        self.cuts = 0
        self.reads: list[tuple[str, int]] = []

    def ask(self) -> None:
        if self.silent:
            raise Unreachable("the store is silent", "Try again.")

    async def reach(self) -> None:
        self.ask()

    async def manifest(self, key: str) -> bytes | None:
        self.ask()
        return self.objects.get(key)

    async def files(self, keys: Sequence[str], *, read: bool = True) -> dict[str, StoredFile]:
        self.ask()
        assert not any(".." in key for key in keys), "no name outside of the job is ever asked for"
        return {
            key: StoredFile(self.sizes.get(key, len(self.objects[key])), sha256(self.objects[key]).hexdigest())
            for key in keys
            if key in self.objects
        }

    async def read(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        self.reads.append((key, offset))
        data = self.objects[key]
        for at in range(offset, len(data), 50_000):
            if self.cut_at is not None and at >= self.cut_at and self.cuts > 0:
                self.cuts -= 1
                raise Unreachable("the line is cut", "Try again.")
            yield data[at : at + 50_000]
            await anyio.lowlevel.checkpoint()


class Kit(SelfStopHouse):
    """A `SelfStopHouse` whose jobs use an in-memory artifact store."""

    def __init__(self, home: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, order: str = "off") -> None:
        super().__init__(home, processes, order)
        self.equip(monkeypatch)

    def equip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shelf = Shelf()
        self.ctx.env = {"GPUWARDEN_STORE_AWS_ACCESS_KEY_ID": "a", "GPUWARDEN_STORE_AWS_SECRET_ACCESS_KEY": "b" * 9}
        monkeypatch.setattr(store_contents, "open_store", lambda ctx, address: self.shelf)
        monkeypatch.setattr("gpuwarden.lifecycle.artifacts.store_copy.open_store", lambda ctx, address: self.shelf)

    def key(self, job: str, path: str, version: str = "") -> str:
        return StoreAddress.parse(KEEP).key(job, path, version)

    def keeps(
        self, job: str, files: dict[str, bytes] = FILES, *, end: bool = True, signed: bool = True, **said: Any
    ) -> dict[str, Any]:
        """Write files and a manifest to the store, as a runner does."""
        rows = []
        for number, (path, data) in enumerate(sorted(files.items()), 1):
            self.shelf.objects[self.key(job, path)] = data
            times = {"mtime_ns": number * 10**9, "ctime_ns": number * 10**9}
            rows.append({"path": path, "size": len(data), "sha256": sha256(data).hexdigest(), **times})
        body: dict[str, Any] = {"schema": 1, "job": job, "taken_at": 1e9, "final": end, "files": rows}
        if end:
            status = {"state": "succeeded", "attempt": 1, "exit_code": 0, "reason": "exited", "why": ""}
            body["end"] = {
                "outputs": ["out"],
                "status": status,
                "disclosed": {"processes": [], "files": [], "complete": True},
                "look": "1",
            }
            body["end"] |= said.pop("ended", {})
        body |= said
        self.lists(job, body, signed=signed)
        return body

    def lists(self, job: str, body: dict[str, Any], *, signed: bool = True) -> None:
        body = (
            sign_report({k: v for k, v in body.items() if k != "mac"}, report_key(job_key(self.ctx, job)))
            if signed
            else body
        )
        self.shelf.objects[self.key(job, MANIFEST)] = json.dumps(body).encode()

    async def night(self, **changes: object) -> str:
        """Run a job that saves, ends, and self-stops its machine while gpuwarden is not running."""
        return await self.asleep(artifact_store=KEEP, **changes)

    async def taken(self) -> None:
        """Terminate the machine at the cloud, and poll until the loss is confirmed."""
        for machine in self.cloud.truths():
            self.cloud.terminate(machine)
        for _ in range(4):
            await self.round(60)

    async def off(self) -> str:
        job = await self.night()
        for _ in range(3):
            await self.round()
        return job


@pytest.fixture
def machines_vanish(tmp_path: Path) -> Iterator[None]:
    """Kill the processes on the test's machines: failing uploads retry for a day, and self-stops wait."""
    yield
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word.startswith(f"{tmp_path}{os.sep}") for word in process.cmdline()):
                process.kill()


@pytest.fixture
def kit(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(tmp_path / "home", processes, monkeypatch)


@pytest.fixture
def ordered(tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(tmp_path / "home", processes, monkeypatch, "terminate")


def landed(done: PullResult) -> dict[str, bytes]:
    return {f.path: Path(f.local).read_bytes() for f in done.received.files}
