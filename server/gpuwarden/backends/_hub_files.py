"""List and read a job's files in repos and buckets, addressed under `/hub` as if the Hub were mounted there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, NotFound
from gpuwarden.core.models import Artifact, Disclosure, Handle, Manifest
from gpuwarden.hub import jobs
from gpuwarden.hub.client import HubClient, HubConfig

HUB_PATH = re.compile(r"/hub/(models|datasets|buckets)/([^/]+/[^/]+)(?:/(.+))?")
MAX_HASHED = 32 << 20  # a repo's non-LFS files are small; for LFS files, the Hub reports the digest


class HubFiles:
    """Lists and hashes files. The sha256 of a file in a bucket is cached under the xet hash that the Hub lists."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._digests: dict[str, str] = {}

    async def manifest(self, hub: HubClient, paths: Iterable[str], *, digests: bool) -> Manifest:
        """Return the files at `paths`. Paths inside the deleted container count as missing."""
        files: list[Artifact] = []
        missing: list[str] = []
        for path in paths:
            where = HUB_PATH.fullmatch(path)
            look = self._in_bucket if where is not None and where[1] == "buckets" else self._in_repo
            found = [] if where is None else await look(hub, where[1], where[2], where[3] or "", digests=digests)
            files += found
            missing += [] if found else [path]
        return Manifest(taken_at=self._clock.now(), files=tuple(files), missing=tuple(missing))

    async def _in_repo(self, hub: HubClient, kind: str, repo: str, inner: str, *, digests: bool) -> list[Artifact]:
        reply = await hub.get(f"/api/{kind}/{repo}", {"blobs": "true"})
        if reply.status == 404:
            return []
        siblings = reply.json.get("siblings") if isinstance(reply.json, dict) else None
        if reply.status != 200 or not isinstance(siblings, list):
            raise BadReply(f"the Hub returned {reply.status} for {repo}: {reply.message}", "Try again.")
        found = []
        for item in siblings:
            name, size = str(item.get("rfilename")), item.get("size")
            if not _inside(name, inner) or not isinstance(size, int):
                continue
            full = f"/hub/{kind}/{repo}/{name}"
            sha = (item.get("lfs") or {}).get("sha256")
            if digests and not sha and size <= MAX_HASHED:
                sha = await _sha256(hub, full)
            found.append(Artifact(path=full, size=size, sha256=sha))
        return found

    async def _in_bucket(self, hub: HubClient, kind: str, bucket: str, inner: str, *, digests: bool) -> list[Artifact]:
        """Return a bucket's files. The Hub lists no sha256 for them, so each file is downloaded once to compute its
        digest.
        """
        found = []
        for item in await jobs.paged(hub, f"/api/buckets/{bucket}/tree", {"recursive": "true"}, missing=()):
            name, size, xet = item.get("path"), item.get("size"), item.get("xetHash")
            if item.get("type") != "file":
                continue
            if not isinstance(name, str) or not isinstance(size, int) or not isinstance(xet, str):
                raise BadReply(f"the Hub's list of {bucket} has a file in an unknown format", "Try again.")
            if not _inside(name, inner):
                continue
            full = f"/hub/{kind}/{bucket}/{name}"
            if digests and xet not in self._digests:
                self._digests[xet] = await _sha256(hub, full)
            found.append(
                Artifact(
                    path=full,
                    size=size,
                    mtime_ns=_nanoseconds(item.get("mtime")),
                    ctime_ns=_nanoseconds(item.get("uploadedAt")),
                    sha256=self._digests[xet] if digests else None,
                )
            )
        return found


class HubOutputs:
    """File access for a backend that deletes a job's container, so that only outputs on the Hub can be read."""

    def __init__(self, clock: Clock, config: HubConfig | None = None) -> None:
        self._clock, self._config = clock, config
        self._files = HubFiles(clock)

    def _hub(self) -> HubClient:
        return HubClient(self._config or HubConfig.from_env(), clock=self._clock)

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the repo and bucket files at `paths`. Paths inside the container count as missing."""
        async with self._hub() as hub:
            return await self._files.manifest(hub, paths, digests=False)

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the repo and bucket files at `paths`, with sha256 digests. The Hub reports the digests of LFS files;
        the digests of other files are computed on this machine.
        """
        async with self._hub() as hub:
            return await self._files.manifest(hub, paths, digests=True)

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from a repo or bucket, starting at `offset`."""
        async with self._hub() as hub:
            async for chunk in download(hub, artifact.path, offset):
                yield chunk

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return an empty disclosure, because the container runs only this job."""
        return Disclosure()


async def download(hub: HubClient, path: str, offset: int) -> AsyncIterator[bytes]:
    """Stream one file from a repo or bucket, starting at `offset`."""
    where = HUB_PATH.fullmatch(path)
    if where is None or not where[3]:
        raise NotFound(f"{path} is not a file on the Hub", "Only paths under /hub can be read after a job has ended.")
    root = "" if where[1] == "models" else f"/{where[1]}"
    revision = "" if where[1] == "buckets" else "/main"
    url = f"{root}/{where[2]}/resolve{revision}/{quote(where[3])}"
    async with hub.stream("GET", url, timeout_s=3600, start=offset) as response:
        if response.status_code not in {200, 206}:
            raise NotFound(f"the Hub returned {response.status_code} for {path}")
        skip = offset if response.status_code == 200 else 0
        async for chunk in response.aiter_bytes():
            yield chunk[skip:] if skip < len(chunk) else b""
            skip = max(0, skip - len(chunk))


def _inside(name: str, inner: str) -> bool:
    return not inner or name == inner or name.startswith(inner + "/")


async def _sha256(hub: HubClient, path: str) -> str:
    digest = hashlib.sha256()
    async for chunk in download(hub, path, 0):
        digest.update(chunk)
    return digest.hexdigest()


def _nanoseconds(text: Any) -> int:
    """Convert a time to integer nanoseconds since the epoch; 0 if it is missing. A float is not precise enough."""
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return 0
    return 0 if at is None else int(at.timestamp()) * 10**9 + at.microsecond * 1000
