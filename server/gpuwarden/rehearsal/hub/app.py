"""The rehearsal Hub's routes for repos: the API of huggingface_hub and hf_xet, over real HTTP.

The shapes follow the Hub's published OpenAPI document where that has a route, and the client's own classes where it
has none (lists, repo info, delete).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.core.repos import REPO_ID
from gpuwarden.rehearsal.hub.store import (
    Commit,
    FileRef,
    HubStore,
    StoredRepo,
    User,
    iso,
    wants_lfs,
)
from gpuwarden.rehearsal.hub.xet import XetStore

PAGE = 1_000


class _RepoConvertor(Convertor[str]):
    regex = "[^/]+(?:/[^/]+)?"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("repo", _RepoConvertor())


class HubError(Exception):
    """An error in the Hub's form."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def problem(_request: Request, error: Exception) -> Response:
    """Return the Hub's error answer."""
    if isinstance(error, HTTPException):
        error = HubError(error.status_code, error.detail)
    assert isinstance(error, HubError)
    headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
    return JSONResponse({"error": error.message}, error.status, headers)


class HubRoutes:
    """The routes of repos over one store."""

    def __init__(self, store: HubStore) -> None:
        self.store = store
        self.xet = XetStore(store.root / "cas", store.blobs)

    # ------------------------------------------------------------------------------------------------- who asks

    def user(self, request: Request) -> User | None:
        """Return the caller; None when anonymous. An unknown token is an error, not anonymous."""
        header = request.headers.get("authorization", "")
        if not header:
            return None
        user = self.store.users.get(header.removeprefix("Bearer ").strip())
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def known_user(self, request: Request) -> User:
        """Return the caller, who must have a token."""
        user = self.user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        return user

    def repo(self, request: Request, *, content: bool = False, write: bool = False) -> StoredRepo:
        """Return the repo that the path names, as far as the caller may see it."""
        kind, repo_id = _kind(request), request.path_params["repo"]
        user = self.user(request)
        repo = self.store.get(kind, repo_id)
        if repo is None or not _sees(user, repo):
            new = self.store.moved_to(kind, repo_id)
            if repo is None and new:
                raise _Moved(str(request.url).replace(f"/{repo_id}", f"/{new}", 1))
            if user is None:
                raise HubError(401, "Invalid username or password.")
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write and not (user and user.may_write(repo.owner)):
            raise HubError(403, f"You don't have the rights to write to {repo.id}")
        inside_gate = user is not None and (user.name in repo.grants or repo.owner in {user.name, *user.orgs})
        if content and repo.gated and not inside_gate:
            said = f"Access to {kind} {repo.id} is restricted and you are not in the authorized list."
            raise HubError(403 if user else 401, said, "GatedRepo")
        return repo

    def commit(self, repo: StoredRepo, rev: str) -> Commit:
        """Return the commit of a revision."""
        commit = repo.commit_of(rev)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return commit

    # -------------------------------------------------------------------------------------------------- account

    async def harnesses(self, _request: Request) -> Response:
        """GET the agents that the Hub knows: none."""
        return JSONResponse({"standardEnvVars": [], "harnesses": {}})

    async def validate_yaml(self, _request: Request) -> Response:
        """POST the front matter of a card; every one is valid here."""
        return JSONResponse({"errors": [], "warnings": []})

    async def whoami(self, request: Request) -> Response:
        """GET /api/whoami-v2"""
        user = self.known_user(request)
        billing = {"canPay": True, "avatarUrl": "", "periodEnd": None}
        orgs = [
            {"type": "org", "id": "0" * 24, "name": o, "fullname": o, "roleInOrg": "write"} | billing for o in user.orgs
        ]
        token = {"displayName": "rehearsal", "role": user.role, "createdAt": iso(0)}
        who: dict[str, Any] = {
            "type": "user",
            "id": "1" * 24,
            "name": user.name,
            "fullname": user.name,
            "avatarUrl": "",
        }
        who |= {"isPro": False, "canPay": True}
        return JSONResponse(who | {"orgs": orgs, "auth": {"type": "access_token", "accessToken": token}})

    # ----------------------------------------------------------------------------------------------------- repos

    async def create(self, request: Request) -> Response:
        """POST /api/repos/create"""
        user, body = self.known_user(request), await request.json()
        kind = body.get("type") or "model"
        repo_id = f"{body.get('organization') or user.name}/{body['name']}"
        if not _usable(repo_id):
            raise HubError(400, f"Invalid repo name: {repo_id}")
        if not user.may_write(repo_id.partition("/")[0]):
            raise HubError(403, f"You don't have the rights to create a {kind} under the namespace")
        url = f"{request.base_url}{'' if kind == 'model' else kind + 's/'}{repo_id}"
        private = body.get("visibility") == "private" or body.get("private") is True
        try:
            repo = self.store.create(kind, repo_id, private=private)
        except FileExistsError:
            return JSONResponse({"error": f"You already created this {kind} repo", "url": url}, 409)
        return JSONResponse({"url": url, "name": repo_id, "id": repo.internal_id})

    async def delete(self, request: Request) -> Response:
        """DELETE /api/repos/delete"""
        user, body = self.known_user(request), await request.json()
        repo_id = f"{body.get('organization') or user.name}/{body['name']}"
        repo = self.store.get(body.get("type") or "model", repo_id)
        if repo is None or not user.may_write(repo.owner):
            raise HubError(404, "Repository not found", "RepoNotFound")
        self.store.delete(repo)
        return PlainTextResponse("OK")

    async def move(self, request: Request) -> Response:
        """POST /api/repos/move"""
        user, body = self.known_user(request), await request.json()
        repo = self.store.get(body.get("type") or "model", body["fromRepo"])
        target = str(body["toRepo"])
        if repo is None or not user.may_write(repo.owner):
            raise HubError(404, "Repository not found", "RepoNotFound")
        if not _usable(target) or not user.may_write(target.partition("/")[0]):
            raise HubError(403, f"You can't move a repo to {target}")
        self.store.move(repo, target)
        return JSONResponse({})

    async def settings(self, request: Request) -> Response:
        """PUT settings: private and gated."""
        repo, body = self.repo(request, write=True), await request.json()
        repo.gated = body.get("gated", repo.gated)
        repo.private = body.get("private", body.get("visibility", "private" if repo.private else "") == "private")
        self.store.save(repo)
        return JSONResponse({})

    async def info(self, request: Request) -> Response:
        """GET repo info, of a revision or of main."""
        repo = self.repo(request)
        commit = self.commit(repo, request.path_params.get("rev", "main"))
        query = request.query_params
        info = self.store.describe(repo, commit, blobs=query.get("blobs", "").lower() == "true")
        if wanted := query.getlist("expand"):
            info = {k: v for k, v in info.items() if k in {"_id", "id", *wanted}}
        return _json(info)

    async def listing(self, request: Request) -> Response:
        """GET the list of models or datasets: search, author, filter, sort, limit, cursor."""
        kind, query, user = _kind(request), request.query_params, self.user(request)
        found = [r for r in self.store.repos(kind) if _sees(user, r) and self._matches(r, query)]
        key: Callable[[StoredRepo], Any] = _SORTS.get(query.get("sort", ""), _SORTS["trendingScore"])
        found.sort(key=lambda r: (key(r), r.id), reverse=True)
        limit, start = _number(query.get("limit"), PAGE), _number(query.get("cursor"), 0)
        page = found[start : start + min(limit, PAGE)]
        headers = {}
        if start + len(page) < len(found):
            url = request.url.include_query_params(cursor=start + len(page))
            headers["Link"] = f'<{url}>; rel="next"'
        usual = ("author", "lastModified", "private", "gated", "downloads", "likes", "tags", "createdAt", "sha")
        shown = {"_id", "id", "modelId", *(query.getlist("expand") or usual)}
        infos = [self.store.describe(r, r.commits[-1], blobs=False) for r in page]
        return _json([{k: v for k, v in info.items() if k in shown} for info in infos], headers)

    def _matches(self, repo: StoredRepo, query: Any) -> bool:
        if (author := query.get("author")) and repo.owner.lower() != author.lower():
            return False
        words = [w for s in query.getlist("search") for w in re.split(r"[^a-z0-9]+", s.lower()) if w]
        if not all(w in repo.id.lower() for w in words):
            return False
        if not (wanted := query.getlist("filter")):
            return True
        info = self.store.describe(repo, repo.commits[-1], blobs=False)
        tags = {*info["tags"], info.get("pipeline_tag"), info.get("library_name")}
        return all(t in tags for t in wanted)

    async def auth_check(self, request: Request) -> Response:
        """GET auth-check: 200 when the caller may read the content."""
        self.repo(request, content=True)
        return JSONResponse({})

    # ----------------------------------------------------------------------------------------------------- trees

    async def tree(self, request: Request) -> Response:
        """GET the files of a revision."""
        repo = self.repo(request)
        commit = self.commit(repo, request.path_params["rev"])
        base = request.path_params.get("path", "").strip("/")
        prefix = f"{base}/" if base else ""
        inside = {p: f for p, f in commit.files.items() if p.startswith(prefix)}
        if base and not inside:
            raise HubError(404, f"{base} does not exist on {request.path_params['rev']}", "EntryNotFound")
        recursive = request.query_params.get("recursive", "").lower() in {"true", "1"}
        folders = {prefix + p.removeprefix(prefix).split("/")[0] for p in inside if "/" in p.removeprefix(prefix)}
        if recursive:
            folders = {"/".join(p.split("/")[:n]) for p in inside for n in range(1, p.count("/") + 1)} - {base}
        files = [_entry(p, f) for p, f in inside.items() if recursive or "/" not in p.removeprefix(prefix)]
        rows = [{"type": "directory", "oid": repo.internal_id.ljust(40, "0"), "size": 0, "path": d} for d in folders]
        rows = sorted(rows + files, key=lambda r: str(r["path"]))
        limit, start = _number(request.query_params.get("limit"), PAGE), _number(request.query_params.get("cursor"), 0)
        more = start + limit < len(rows)
        url = request.url.include_query_params(cursor=start + limit)
        return _json(rows[start : start + limit], {"Link": f'<{url}>; rel="next"'} if more else None)

    async def paths_info(self, request: Request) -> Response:
        """POST paths-info: the named files that exist."""
        commit = self.commit(self.repo(request), request.path_params["rev"])
        if "json" in request.headers.get("content-type", ""):
            paths = (await request.json())["paths"]
        else:
            paths = (await request.form()).getlist("paths")
        return _json([_entry(str(p), commit.files[str(p)]) for p in paths if str(p) in commit.files])

    async def refs(self, request: Request) -> Response:
        """GET branches and tags."""
        repo = self.repo(request)

        def refs(pairs: Mapping[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in pairs.items()]

        return _json({"branches": refs(repo.branches, "heads"), "tags": refs(repo.tags, "tags"), "converts": []})

    async def commits(self, request: Request) -> Response:
        """GET the history."""
        repo = self.repo(request)
        self.commit(repo, request.path_params["rev"])
        rows = [
            {"id": c.oid, "title": c.title, "message": "", "authors": [], "date": iso(c.at)}
            for c in reversed(repo.commits)
        ]
        return _json(rows)

    async def make_ref(self, request: Request) -> Response:
        """POST a branch or a tag."""
        repo, body = self.repo(request, write=True), await request.json()
        start = body.get("startingPoint") or request.path_params["rev"] if "/tag/" in request.url.path else "main"
        oid = self.commit(repo, start).oid
        name = body.get("tag") or request.path_params["rev"]
        (repo.tags if "/tag/" in request.url.path else repo.branches)[name] = oid
        self.store.save(repo)
        return JSONResponse({})

    # --------------------------------------------------------------------------------------------------- content

    async def resolve(self, request: Request) -> Response:
        """GET or HEAD one file, with ranges."""
        repo = self.repo(request, content=True)
        commit = self.commit(repo, request.path_params["rev"])
        path = request.path_params["path"]
        ref = commit.files.get(path)
        if ref is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{ref.sha256 if ref.lfs else ref.oid()}"'}
        if ref.lfs:
            headers |= {"X-Linked-Etag": f'"{ref.sha256}"', "X-Linked-Size": str(ref.size)}
        if ref.xet:
            auth = f"{request.base_url}api/{repo.type}s/{repo.id}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": ref.xet, "Link": f'<{auth}>; rel="xet-auth"'}
        return FileResponse(self.store.blob(ref), headers=headers, media_type="application/octet-stream")

    async def preupload(self, request: Request) -> Response:
        """POST preupload: which files are uploaded by LFS."""
        repo, body = self.repo(request, write=True), await request.json()
        commit = self.commit(repo, request.path_params["rev"])
        files = []
        for item in body["files"]:
            mode = "lfs" if wants_lfs(item["path"], item["size"]) else "regular"
            old = commit.files.get(item["path"])
            known = {"oid": old.sha256 if old.lfs else old.oid()} if old else {}
            files.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False} | known)
        return _json({"files": files, "commitOid": commit.oid})

    async def make_commit(self, request: Request) -> Response:
        """POST commit: newline-delimited JSON."""
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
                    added[value["path"]] = self._lfs_file(value["oid"], value["size"])
                case "deletedFile":
                    removed.append(value["path"])
                case "deletedFolder":
                    removed.append(value["path"].rstrip("/") + "/")
        commit = self.store.commit(repo, added, title, removed, request.path_params["rev"])
        url = f"{request.base_url}{repo.id}/commit/{commit.oid}"
        return _json({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    def _lfs_file(self, sha: str, size: int) -> FileRef:
        if not re.fullmatch(r"[0-9a-f]{64}", sha):
            raise HubError(400, "an LFS oid is a sha256 digest")
        ref = FileRef(sha, size, lfs=True)
        if not self.store.blob(ref).exists():
            ref.xet = self.xet.fetch(sha, size)
        if not self.store.blob(ref).exists():
            raise HubError(400, f"Your push was rejected because the LFS object {sha} was not uploaded.")
        return ref

    async def lfs_batch(self, request: Request) -> Response:
        """POST the LFS batch call of a plain upload."""
        repo, body = self.repo(request, write=True), await request.json()
        objects = []
        for item in body["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if not (self.store.blobs / item["oid"]).exists():
                put = f"{request.base_url}_lfs/{item['oid']}"
                verify = f"{request.base_url}_lfs/{item['oid']}/verify"
                entry["actions"] = {"upload": {"href": put, "header": {}}, "verify": {"href": verify, "header": {}}}
            objects.append(entry)
        assert repo is not None
        return JSONResponse({"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json")

    async def lfs_put(self, request: Request) -> Response:
        """PUT the bytes of one LFS object."""
        ref = self.store.add_blob(await request.body())
        if ref.sha256 != request.path_params["oid"]:
            raise HubError(400, "the content does not have the digest that was announced")
        return PlainTextResponse("")

    async def lfs_verify(self, request: Request) -> Response:
        """POST: whether an LFS object has arrived."""
        if not (self.store.blobs / request.path_params["oid"]).exists():
            raise HubError(404, "object not found")
        return JSONResponse({})

    async def xet_token(self, request: Request) -> Response:
        """GET a token for the xet store, which is a folder here."""
        self.repo(request, content=True, write="write" in request.url.path)
        answer = self.xet.token(self.store.clock.now())
        headers = {
            "X-Xet-Cas-Url": str(answer["casUrl"]),
            "X-Xet-Access-Token": str(answer["accessToken"]),
            "X-Xet-Token-Expiration": str(answer["exp"]),
        }
        return JSONResponse(answer, headers=headers)

    # ---------------------------------------------------------------------------------------------------- routes

    def routes(self) -> list[BaseRoute]:
        """Return all routes of repos, the specific ones first."""
        rows: list[BaseRoute] = [
            Route("/api/whoami-v2", self.whoami),
            Route("/api/agent-harnesses", self.harnesses),
            Route("/api/validate-yaml", self.validate_yaml, methods=["POST"]),
            Route("/api/repos/create", self.create, methods=["POST"]),
            Route("/api/repos/delete", self.delete, methods=["DELETE"]),
            Route("/api/repos/move", self.move, methods=["POST"]),
            Route("/_lfs/{oid}", self.lfs_put, methods=["PUT"]),
            Route("/_lfs/{oid}/verify", self.lfs_verify, methods=["POST"]),
        ]
        for kind in ("models", "datasets", "spaces"):
            base = f"/api/{kind}"
            one = base + "/{repo:repo}"
            rows += [
                Route(base, self.listing),
                Route(one + "/revision/{rev:path}", self.info),
                Route(one + "/tree/{rev}", self.tree),
                Route(one + "/tree/{rev}/{path:path}", self.tree),
                Route(one + "/paths-info/{rev}", self.paths_info, methods=["POST"]),
                Route(one + "/refs", self.refs),
                Route(one + "/commits/{rev}", self.commits),
                Route(one + "/auth-check", self.auth_check),
                Route(one + "/settings", self.settings, methods=["PUT"]),
                Route(one + "/branch/{rev:path}", self.make_ref, methods=["POST"]),
                Route(one + "/tag/{rev:path}", self.make_ref, methods=["POST"]),
                Route(one + "/preupload/{rev}", self.preupload, methods=["POST"]),
                Route(one + "/commit/{rev}", self.make_commit, methods=["POST"]),
                Route(one + "/xet-write-token/{rev}", self.xet_token),
                Route(one + "/xet-read-token/{rev}", self.xet_token),
                Route(one, self.info),
            ]
            root = "" if kind == "models" else f"/{kind}"
            rows += [
                Route(root + "/{repo:repo}.git/info/lfs/objects/batch", self.lfs_batch, methods=["POST"]),
                Route(root + "/{repo:repo}/resolve/{rev}/{path:path}", self.resolve),
            ]
        return sorted(rows, key=lambda r: isinstance(r, Route) and r.path.startswith("/{repo"))


class _Moved(Exception):
    """The repo was renamed; `url` is the same request at its new name."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def make_app(store: HubStore, more: list[BaseRoute]) -> Starlette:
    """Return the application over a store, with further routes that come first."""
    handlers: Any = {
        HubError: problem,
        HTTPException: problem,
        _Moved: lambda _request, moved: RedirectResponse(moved.url, 307),
    }
    return Starlette(routes=more + HubRoutes(store).routes(), exception_handlers=handlers)


_SORTS: dict[str, Callable[[StoredRepo], Any]] = {
    "trendingScore": lambda r: r.likes,
    "downloads": lambda r: r.downloads,
    "likes": lambda r: r.likes,
    "createdAt": lambda r: r.created_at,
    "lastModified": lambda r: r.commits[-1].at,
}


def _usable(repo_id: str) -> bool:
    return re.fullmatch(REPO_ID, repo_id) is not None and ".." not in repo_id


def _kind(request: Request) -> str:
    for kind in ("dataset", "space"):
        if request.url.path.startswith((f"/api/{kind}s", f"/{kind}s/")):
            return kind
    return "model"


def _sees(user: User | None, repo: StoredRepo) -> bool:
    return not repo.private or (user is not None and repo.owner in {user.name, *user.orgs})


def _entry(path: str, ref: FileRef) -> dict[str, Any]:
    lfs = {"lfs": {"oid": ref.sha256, "size": ref.size, "pointerSize": 134}} if ref.lfs else {}
    xet = {"xetHash": ref.xet} if ref.xet else {}
    return {"type": "file", "oid": ref.oid(), "size": ref.size, "path": path, **lfs, **xet}


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default


def _json(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    body = json.dumps(value, default=str).encode()
    return Response(body, media_type="application/json", headers=dict(headers or {}))
