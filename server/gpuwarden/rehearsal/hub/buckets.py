"""The rehearsal Hub's buckets. Each is a folder on disk, served with the protocol that the real client uses.

Jobs mount a bucket's folder, so a file that a running job writes is listed immediately and remains after the job has
ended. Uploads and downloads use the real hf_xet.
"""

from __future__ import annotations

import json
import mimetypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute

from gpuwarden.rehearsal.hub.access import Access, HubError
from gpuwarden.rehearsal.hub.app import RepoRoutes
from gpuwarden.rehearsal.hub.bucket_requests import AddFile, CopyFile, CreateBucket, DeleteFile, Operation, Settings
from gpuwarden.rehearsal.hub.store import HubStore, User, iso
from gpuwarden.rehearsal.hub.strict import parsed, route

PAGE = 1_000
MOST = 5_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_OPERATIONS: dict[str, Any] = {"addFile": AddFile, "copyFile": CopyFile, "deleteFile": DeleteFile}


@dataclass
class Bucket:
    """One bucket. `files` is the folder that contains its files."""

    id: str
    internal_id: str
    private: bool
    created_at: float
    files: Path

    @property
    def owner(self) -> str:
        """Return the namespace to which the bucket belongs."""
        return self.id.partition("/")[0]

    def walk(self) -> Iterator[tuple[str, Path]]:
        """Yield every file and its path in the bucket. Links are omitted."""
        for folder, _, names in os.walk(self.files):
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(self.files).as_posix(), path

    def place(self, path: str) -> Path:
        """Return the file at a path. Raises ValueError if it is outside the bucket or passes through a link."""
        pure = PurePosixPath(path)
        if not path or path.startswith("/") or ".." in pure.parts or "\\" in path or str(pure) != path:
            raise ValueError("invalid path")
        target = self.files / path
        if target.is_symlink() or not target.parent.resolve().is_relative_to(self.files.resolve()):
            raise ValueError("invalid path")
        return target


class HubBuckets:
    """The buckets of one Hub and their routes."""

    def __init__(self, store: HubStore) -> None:
        self.store = store
        self.access = Access(store)
        self._root = store.root / "buckets"
        self._hashes: dict[tuple[str, int, int, int], str] = {}
        self.buckets: dict[str, Bucket] = {}
        for file in sorted(self._root.glob("*/*/bucket.json")):
            raw = json.loads(file.read_text())
            self.buckets[raw["id"]] = Bucket(**raw, files=file.parent / "files")

    def routes(self) -> list[BaseRoute]:
        """Return the routes for buckets."""
        one = "/api/buckets/{namespace}/{name}"
        # The JavaScript client sends `expand`, which is missing from the API description.
        tree = ("expand", "limit", "cursor", "recursive", "sort", "direction")
        return [
            route("/api/repos/move", self.move, methods=["POST"], fields="fromRepo toRepo type"),
            route("/api/buckets/{namespace}", self.listing, query=("search",)),
            route(one, self.create, methods=["POST"]),
            route(one, self.info),
            route(one, self.delete, methods=["DELETE"]),
            route(one + "/settings", self.settings, methods=["PUT"]),
            route(one + "/batch", self.batch, methods=["POST"]),
            route(one + "/tree", self.tree, query=tree),
            route(one + "/tree/{path:path}", self.tree, query=tree),
            route(one + "/paths-info", self.paths_info, methods=["POST"], fields="paths"),
            route(one + "/xet-write-token", self.xet_token),
            route(one + "/xet-read-token", self.xet_token),
            route(
                "/buckets/{namespace}/{name}/resolve/{path:path}",
                self.resolve,
                query=("download", "noContentDisposition"),
            ),
        ]

    # --------------------------------------------------------------------------------------------------- buckets

    def make(self, bucket_id: str, *, private: bool = True) -> Bucket:
        """Create a bucket and return it. Raises FileExistsError if the bucket already exists."""
        if bucket_id in self.buckets:
            raise FileExistsError(bucket_id)
        folder = self._root / bucket_id
        (folder / "files").mkdir(parents=True)
        now = self.store.clock.now()
        bucket = Bucket(bucket_id, secrets.token_hex(12), private, now, folder / "files")
        self._save(bucket)
        self.buckets[bucket_id] = bucket
        return bucket

    def seen(self, user: User | None, bucket_id: str) -> Bucket | None:
        """Return a bucket, if the user may read it."""
        bucket = self.buckets.get(bucket_id)
        if bucket is None or (bucket.private and (user is None or bucket.owner not in {user.name, *user.orgs})):
            return None
        return bucket

    def _save(self, bucket: Bucket) -> None:
        fields = {"id": bucket.id, "internal_id": bucket.internal_id, "private": bucket.private}
        text = json.dumps(fields | {"created_at": bucket.created_at})
        (bucket.files.parent / "bucket.json").write_text(text)

    def _bucket(self, request: Request, *, write: bool = False) -> Bucket:
        user = self.access.known_user(request) if write else self.access.user(request)
        namespace, name = request.path_params["namespace"], request.path_params["name"]
        bucket = self.seen(user, f"{user.name if user and namespace == 'me' else namespace}/{name}")
        if bucket is None:
            if user is None:
                raise HubError(401, "Invalid username or password.")
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write and not (user and user.may_write(bucket.owner)):
            raise HubError(403, f"You don't have the rights to write to {bucket.id}")
        return bucket

    async def listing(self, request: Request) -> Response:
        """GET the buckets in a namespace."""
        user, namespace = self.access.known_user(request), request.path_params["namespace"]
        namespace = user.name if namespace == "me" else namespace
        words = request.query_params.get("search", "").lower()
        mine = [b for b in self.buckets.values() if b.owner == namespace and words in b.id.lower()]
        return JSONResponse([self._shown(b) for b in mine if self.seen(user, b.id)])

    async def create(self, request: Request) -> Response:
        """POST a new bucket."""
        user, name = self.access.known_user(request), request.path_params["name"]
        body = parsed(CreateBucket, await request.json())
        owner = user.name if request.path_params["namespace"] == "me" else request.path_params["namespace"]
        if not _NAME.fullmatch(name):
            raise HubError(400, f"Invalid bucket name: {name}")
        if not user.may_write(owner):
            raise HubError(403, "You don't have the rights to create a bucket under the namespace")
        url = f"{request.base_url}buckets/{owner}/{name}"
        if (old := self.buckets.get(f"{owner}/{name}")) is not None:
            conflict = {"error": "You already created this bucket", "url": url, "id": old.internal_id}
            return JSONResponse(conflict, 409, {"X-Error-Message": conflict["error"]})
        private = body.private or (body.visibility or "").startswith("private")
        bucket = self.make(f"{owner}/{name}", private=private)
        return JSONResponse({"url": url, "name": bucket.id, "id": bucket.internal_id})

    async def info(self, request: Request) -> Response:
        """GET one bucket."""
        return JSONResponse(self._shown(self._bucket(request)))

    async def delete(self, request: Request) -> Response:
        """DELETE a bucket and its files."""
        bucket = self._bucket(request, write=True)
        del self.buckets[bucket.id]
        shutil.rmtree(bucket.files.parent, ignore_errors=True)
        return PlainTextResponse("OK")

    async def move(self, request: Request) -> Response:
        """POST a new name for a bucket. Requests about repos are passed to `RepoRoutes`."""
        body, user = await request.json(), self.access.known_user(request)
        if body.get("type") != "bucket":
            return await RepoRoutes(self.store).move(request)
        bucket, target = self.buckets.get(body["fromRepo"]), str(body["toRepo"])
        if bucket is None or not user.may_write(bucket.owner):
            raise HubError(404, "Repository not found", "RepoNotFound")
        owner, _, name = target.partition("/")
        if target in self.buckets or not _NAME.fullmatch(name) or not user.may_write(owner):
            raise HubError(403, f"You can't move a bucket to {target}")
        folder = self._root / target
        folder.parent.mkdir(parents=True, exist_ok=True)
        bucket.files.parent.rename(folder)
        del self.buckets[bucket.id]
        bucket.id, bucket.files = target, folder / "files"
        self.buckets[target] = bucket
        self._save(bucket)
        return JSONResponse({})

    async def settings(self, request: Request) -> Response:
        """PUT a bucket's visibility."""
        bucket, body = self._bucket(request, write=True), parsed(Settings, await request.json())
        bucket.private = body.visibility == "private" if body.visibility else bool(body.private)
        self._save(bucket)
        return JSONResponse({"private": bucket.private})

    def _shown(self, bucket: Bucket) -> dict[str, Any]:
        stats = [path.stat() for _, path in bucket.walk()]
        at = max([bucket.created_at, *(s.st_mtime for s in stats)])
        names = {"author": bucket.owner, "id": bucket.id, "private": bucket.private, "repoType": "bucket"}
        times = {"createdAt": iso(bucket.created_at), "updatedAt": iso(at)}
        return names | times | {"size": sum(s.st_size for s in stats), "totalFiles": len(stats), "cdnRegions": []}

    # ----------------------------------------------------------------------------------------------------- files

    async def tree(self, request: Request) -> Response:
        """Handle GET for the files in a folder or in the whole bucket. Unless `recursive` is set, subfolders are
        listed without their files.
        """
        bucket, query = self._bucket(request), request.query_params
        if query.get("sort", "path") not in {"path", "uploadedAt"} or query.get("direction", "asc") not in _DIRECTIONS:
            raise HubError(400, "Invalid sort or direction")
        base = request.path_params.get("path", "").strip("/")
        prefix = f"{base}/" if base else ""
        inside = {p: f for p, f in bucket.walk() if p.startswith(prefix)}
        recursive = query.get("recursive", "true").lower() in {"true", "1"}
        deep = [p for p in inside if "/" in p.removeprefix(prefix)]
        shown = {p: f for p, f in inside.items() if recursive or p not in deep}
        rows = [await self._entry(p, f) for p, f in shown.items()]
        if not recursive:
            folders = {prefix + p.removeprefix(prefix).split("/")[0] for p in deep}
            at = {d: max(inside[p].stat().st_ctime for p in deep if p.startswith(f"{d}/")) for d in folders}
            rows += [{"type": "directory", "path": d, "uploadedAt": iso(t)} for d, t in at.items()]
        rows.sort(key=lambda row: str(row[query.get("sort", "path")]), reverse=query.get("direction") == "desc")
        limit, start = int(query.get("limit", PAGE)), int(query.get("cursor", 0))
        if not 1 <= limit <= MOST:
            raise HubError(400, f"limit must be between 1 and {MOST}")
        url = request.url.include_query_params(cursor=start + limit)
        headers = {"Link": f'<{url}>; rel="next"'} if start + limit < len(rows) else {}
        return JSONResponse(rows[start : start + limit], headers=headers)

    async def paths_info(self, request: Request) -> Response:
        """POST paths-info. Return information about the named files that exist."""
        bucket, paths = self._bucket(request), (await request.json()).get("paths")
        rows = []
        for path in [paths] if isinstance(paths, str) else paths:
            file = _known_place(bucket, str(path))
            rows += [await self._entry(path, file)] if file is not None and file.is_file() else []
        return JSONResponse(rows)

    async def resolve(self, request: Request) -> Response:
        """GET or HEAD one file."""
        bucket, path = self._bucket(request), request.path_params["path"]
        file = _known_place(bucket, path)
        if file is None or not file.is_file():
            raise HubError(404, "Entry not found", "EntryNotFound")
        auth = f"{request.base_url}api/buckets/{bucket.id}/xet-read-token"
        return self.access.xet_file(request, file, await self.hash_of(file), auth)

    async def xet_token(self, request: Request) -> Response:
        """GET a token for the xet store."""
        write = request.url.path.endswith("xet-write-token")
        self._bucket(request, write=write)
        return self.access.xet_answer(write=write)

    async def batch(self, request: Request) -> Response:
        """POST operations, one per line: first additions and copies of content in the xet store, then deletions."""
        bucket, user = self._bucket(request, write=True), self.access.known_user(request)
        operations: list[Operation] = []
        for line in filter(bytes.strip, (await request.body()).splitlines()):
            raw = json.loads(line)
            model = _OPERATIONS.get(str(raw.get("type")) if isinstance(raw, dict) else "")
            if model is None:
                raise HubError(400, "Unknown operation")
            operations.append(parsed(model, raw))
        deleting = [isinstance(o, DeleteFile) for o in operations]
        if deleting != sorted(deleting):
            raise HubError(400, "All add/copy operations must come before all delete operations")
        failed = []
        for operation in operations:
            try:
                await self._apply(bucket, user, operation)
            except (ValueError, OSError) as error:
                failed.append({"path": operation.path, "error": str(error)})
        done = len(operations) - len(failed)
        answer = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
        return JSONResponse(answer, 422 if failed and not done else 200)

    async def _apply(self, bucket: Bucket, user: User, operation: Operation) -> None:
        target = bucket.place(operation.path)
        if isinstance(operation, DeleteFile):
            if not target.is_file():
                raise ValueError("file not found")
            target.unlink()
            return
        if isinstance(operation, CopyFile):
            await self._readable(user, operation)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{secrets.token_hex(6)}.part")
        try:
            await to_thread.run_sync(self.store.xet.save, operation.xetHash, part)
        except KeyError as error:
            raise ValueError(str(error)) from None
        if operation.mtime is not None:
            os.utime(part, (operation.mtime / 1000, operation.mtime / 1000))
        part.replace(target)

    async def _readable(self, user: User, operation: CopyFile) -> None:
        """Raise ValueError unless the user may read the source of a copy and the source has the file."""
        if operation.sourceRepoType == "bucket":
            bucket = self.seen(user, operation.sourceRepoId)
            there = {await self.hash_of(path) for _, path in bucket.walk()} if bucket else set()
        else:
            repo = self.store.get(operation.sourceRepoType, operation.sourceRepoId)
            seen = repo is not None and (not repo.private or repo.owner in {user.name, *user.orgs})
            there = {f.xet for f in repo.commits[-1].files.values()} if repo and seen else set()
        if operation.xetHash not in there:
            raise ValueError(f"{operation.sourceRepoId} does not have a file with this hash")

    async def _entry(self, path: str, file: Path) -> dict[str, Any]:
        stat = _stat(file)
        kind = mimetypes.guess_type(path)[0]
        times = {"mtime": iso(stat.st_mtime), "uploadedAt": iso(stat.st_ctime)}
        row = {"type": "file", "path": path, "size": stat.st_size, "xetHash": await self.hash_of(file)}
        return row | times | ({"contentType": kind} if kind else {})

    async def hash_of(self, file: Path) -> str:
        """Return a file's xet hash. A file that is not in the xet store yet, such as a job's output, is added."""
        stat = _stat(file)
        key = (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if key not in self._hashes:
            self._hashes[key] = await to_thread.run_sync(self.store.xet.add, file)
        return self._hashes[key]


_DIRECTIONS = frozenset({"asc", "desc"})


def _stat(file: Path) -> os.stat_result:
    """Return a file's `stat` result. The disk is local, so the call does not delay the server."""
    return file.stat()


def _known_place(bucket: Bucket, path: str) -> Path | None:
    try:
        return bucket.place(path)
    except ValueError:
        return None
