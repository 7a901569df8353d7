"""Define the routes that upload files to the rehearsal Hub: commits, Git LFS and the xet store."""

from __future__ import annotations

import base64
import json
import re

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.rehearsal.hub.access import Access, HubError, json_answer
from gpuwarden.rehearsal.hub.store import FileRef, wants_lfs
from gpuwarden.rehearsal.hub.strict import route


class UploadRoutes(Access):
    """The upload routes for one store."""

    async def preupload(self, request: Request) -> Response:
        """POST preupload. Return, for each file, whether it must be uploaded through LFS."""
        repo, body = self.repo(request, write=True), await request.json()
        commit = self.commit(repo, request.path_params["rev"])
        files = []
        for item in body["files"]:
            mode = "lfs" if wants_lfs(item["path"], item["size"]) else "regular"
            old = commit.files.get(item["path"])
            known = {"oid": old.sha256 if old.lfs else old.oid()} if old else {}
            files.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False} | known)
        return json_answer({"files": files, "commitOid": commit.oid})

    async def make_commit(self, request: Request) -> Response:
        """POST a commit, which is sent as newline-delimited JSON."""
        repo = self.repo(request, write=True)
        title, added, removed = "commit", dict[str, FileRef](), list[str]()
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            match item["key"]:
                case "header":
                    title = value["summary"]
                    parent = value.get("parentCommit")
                    if parent and parent != self.commit(repo, request.path_params["rev"]).oid:
                        raise HubError(412, "A commit has happened since. Please refresh and try again.")
                case "file":
                    added[value["path"]] = self.store.add_blob(base64.b64decode(value["content"]), value["path"])
                    added[value["path"]].lfs = False
                case "lfsFile":
                    added[value["path"]] = await self._lfs_file(value["oid"], value["size"])
                case "deletedFile":
                    removed.append(value["path"])
                case "deletedFolder":
                    removed.append(value["path"].rstrip("/") + "/")
        commit = self.store.commit(repo, added, title, removed, request.path_params["rev"])
        url = f"{request.base_url}{repo.id}/commit/{commit.oid}"
        return json_answer({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    async def _lfs_file(self, sha: str, size: int) -> FileRef:
        if not re.fullmatch(r"[0-9a-f]{64}", sha):
            raise HubError(400, "an LFS oid must be a sha256 digest")
        ref = FileRef(sha, size, lfs=True)
        if not self.store.blob(ref).exists():
            ref.xet = await to_thread.run_sync(self.store.xet.fetch, sha)
        if not self.store.blob(ref).exists():
            raise HubError(400, f"Your push was rejected because the LFS object {sha} was not uploaded.")
        return ref

    async def lfs_batch(self, request: Request) -> Response:
        """POST the LFS batch request. The response has an upload address for each missing object. A client that
        supports xet instead gets the address that issues tokens for the xet store.
        """
        repo, body = self.repo(request, write=True), await request.json()
        xet = "xet" in body.get("transfers", ())
        refresh = f"{request.base_url}api/{repo.type}s/{repo.id}/xet-write-token/main"
        login = dict(self.xet_answer(write=True).headers) if xet else {}
        objects = []
        for item in body["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            new = not (self.store.blobs / item["oid"]).exists()
            if new and xet:
                header = {k: v for k, v in login.items() if k.startswith("x-xet-")}
                entry["actions"] = {"upload": {"href": refresh, "header": header}}
            elif new:
                put = f"{request.base_url}_lfs/{item['oid']}"
                verify = f"{request.base_url}_lfs/{item['oid']}/verify"
                entry["actions"] = {"upload": {"href": put, "header": {}}, "verify": {"href": verify, "header": {}}}
            objects.append(entry)
        answer = {"transfer": "xet" if xet else "basic", "objects": objects}
        return JSONResponse(answer, media_type="application/vnd.git-lfs+json")

    async def lfs_put(self, request: Request) -> Response:
        """PUT the bytes of one LFS object."""
        ref = self.store.add_blob(await request.body())
        if ref.sha256 != request.path_params["oid"]:
            raise HubError(400, "the content does not have the expected digest")
        return PlainTextResponse("")

    async def lfs_verify(self, request: Request) -> Response:
        """POST to check whether an LFS object has been uploaded."""
        if not (self.store.blobs / request.path_params["oid"]).exists():
            raise HubError(404, "object not found")
        return JSONResponse({})

    async def xet_token(self, request: Request) -> Response:
        """GET a token for the xet store."""
        write = "xet-write-token" in request.url.path
        self.repo(request, content=True, write=write)
        return self.xet_answer(write=write)

    def routes(self) -> list[BaseRoute]:
        """Return the upload routes."""
        rows: list[BaseRoute] = [
            Route("/_lfs/{oid}", self.lfs_put, methods=["PUT"]),
            Route("/_lfs/{oid}/verify", self.lfs_verify, methods=["POST"]),
        ]
        for kind in ("models", "datasets", "spaces"):
            one = f"/api/{kind}/{{repo:repo}}"
            fields = "files gitAttributes gitIgnore sample"
            root = "" if kind == "models" else f"/{kind}"
            rows += [
                route(one + "/preupload/{rev}", self.preupload, methods=["POST"], fields=fields),
                route(one + "/commit/{rev}", self.make_commit, methods=["POST"]),
                route(one + "/xet-write-token/{rev}", self.xet_token),
                route(one + "/xet-read-token/{rev}", self.xet_token),
                route(root + "/{repo:repo}.git/info/lfs/objects/batch", self.lfs_batch, methods=["POST"]),
            ]
        return rows
