"""The rehearsal Hub's routes for repos: the API that huggingface_hub and hf_xet use, over real HTTP.

Requests and responses follow the Hub's published OpenAPI document. For routes that are missing from it (lists, repo
info, delete), they follow the format that the client's own classes expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.core.repos import REPO_ID
from gpuwarden.rehearsal.hub.access import Access, HubError, RepoMoved, json_answer, kind_of, problem, sees
from gpuwarden.rehearsal.hub.store import FileRef, HubStore, StoredRepo, iso
from gpuwarden.rehearsal.hub.strict import route
from gpuwarden.rehearsal.hub.uploads import UploadRoutes

PAGE = 1_000
_CREATE = "name organization type private visibility license sdk files resourceGroupId"
_INFO = ("blobs", "expand", "expand[]", "securityStatus")
_LISTING = (
    *("search", "author", "filter", "pipeline_tag", "gated"),
    *("sort", "direction", "limit", "cursor", "expand", "full", "cardData", "config"),
)
_TREE = ("recursive", "expand", "limit", "cursor")


class _RepoConvertor(Convertor[str]):
    regex = "[^/]+(?:/[^/]+)?"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("repo", _RepoConvertor())


class RepoRoutes(Access):
    """The routes for the repos in one store."""

    # -------------------------------------------------------------------------------------------------- account

    async def harnesses(self, _request: Request) -> Response:
        """GET the list of known agents. The list is always empty."""
        return JSONResponse({"standardEnvVars": [], "harnesses": {}})

    async def validate_yaml(self, _request: Request) -> Response:
        """POST the front matter of a card to validate it. Every card is accepted."""
        return JSONResponse({"errors": [], "warnings": []})

    async def whoami(self, request: Request) -> Response:
        """GET /api/whoami-v2, the caller's account."""
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
        """POST /api/repos/create, which creates a repo."""
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
        """DELETE /api/repos/delete, which deletes a repo."""
        user, body = self.known_user(request), await request.json()
        repo_id = f"{body.get('organization') or user.name}/{body['name']}"
        repo = self.store.get(body.get("type") or "model", repo_id)
        if repo is None or not user.may_write(repo.owner):
            raise HubError(404, "Repository not found", "RepoNotFound")
        self.store.delete(repo)
        return PlainTextResponse("OK")

    async def move(self, request: Request) -> Response:
        """POST /api/repos/move, which renames a repo."""
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
        """PUT a repo's visibility and gating."""
        repo, body = self.repo(request, write=True), await request.json()
        repo.gated = body.get("gated", repo.gated)
        repo.private = body.get("private", body.get("visibility", "private" if repo.private else "") == "private")
        self.store.save(repo)
        return JSONResponse({})

    async def info(self, request: Request) -> Response:
        """GET information about a repo at a revision; the default is main."""
        repo = self.repo(request)
        commit = self.commit(repo, request.path_params.get("rev", "main"))
        query = request.query_params
        info = self.store.describe(repo, commit, blobs=query.get("blobs", "").lower() == "true")
        if wanted := [*query.getlist("expand"), *query.getlist("expand[]")]:
            info = {k: v for k, v in info.items() if k in {"_id", "id", *wanted}}
        return json_answer(info)

    async def listing(self, request: Request) -> Response:
        """GET the list of models or datasets, with the parameters search, author, filter, sort, limit and cursor."""
        kind, query, user = kind_of(request), request.query_params, self.user(request)
        found = [r for r in self.store.repos(kind) if sees(user, r) and self._matches(r, query)]
        key: Callable[[StoredRepo], Any] | None = _SORTS.get(query.get("sort", "trendingScore"))
        if key is None:
            raise HubError(400, f"Invalid sort {query['sort']!r}")
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
        return json_answer([{k: v for k, v in info.items() if k in shown} for info in infos], headers)

    def _matches(self, repo: StoredRepo, query: Any) -> bool:
        if (author := query.get("author")) and repo.owner.lower() != author.lower():
            return False
        words = [w for s in query.getlist("search") for w in re.split(r"[^a-z0-9]+", s.lower()) if w]
        if not all(w in repo.id.lower() for w in words):
            return False
        wanted = [*query.getlist("filter"), *query.getlist("pipeline_tag")]
        if "gated" in query and bool(repo.gated) is not (query["gated"].lower() == "true"):
            return False
        if not wanted:
            return True
        info = self.store.describe(repo, repo.commits[-1], blobs=False)
        tags = {*info["tags"], info.get("pipeline_tag"), info.get("library_name")}
        return all(t in tags for t in wanted)

    async def auth_check(self, request: Request) -> Response:
        """GET auth-check. The status is 200 if the caller may read the content."""
        self.repo(request, content=True)
        return JSONResponse({})

    # ----------------------------------------------------------------------------------------------------- trees

    async def tree(self, request: Request) -> Response:
        """GET the files and folders in a repo at a revision."""
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
        return json_answer(rows[start : start + limit], {"Link": f'<{url}>; rel="next"'} if more else None)

    async def paths_info(self, request: Request) -> Response:
        """POST paths-info. Return the entries of the named files that exist."""
        commit = self.commit(self.repo(request), request.path_params["rev"])
        if "json" in request.headers.get("content-type", ""):
            paths = (await request.json())["paths"]
        else:
            paths = (await request.form()).getlist("paths")
        return json_answer([_entry(str(p), commit.files[str(p)]) for p in paths if str(p) in commit.files])

    async def refs(self, request: Request) -> Response:
        """GET a repo's branches and tags."""
        repo = self.repo(request)

        def refs(pairs: Mapping[str, str], kind: str) -> list[dict[str, str]]:
            return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": oid} for n, oid in pairs.items()]

        return json_answer({"branches": refs(repo.branches, "heads"), "tags": refs(repo.tags, "tags"), "converts": []})

    async def commits(self, request: Request) -> Response:
        """GET a repo's commits, newest first."""
        repo = self.repo(request)
        self.commit(repo, request.path_params["rev"])
        rows = [
            {"id": c.oid, "title": c.title, "message": "", "authors": [], "date": iso(c.at)}
            for c in reversed(repo.commits)
        ]
        return json_answer(rows)

    async def make_ref(self, request: Request) -> Response:
        """POST a new branch or tag."""
        repo, body = self.repo(request, write=True), await request.json()
        start = body.get("startingPoint") or request.path_params["rev"] if "/tag/" in request.url.path else "main"
        oid = self.commit(repo, start).oid
        name = body.get("tag") or request.path_params["rev"]
        (repo.tags if "/tag/" in request.url.path else repo.branches)[name] = oid
        self.store.save(repo)
        return JSONResponse({})

    # --------------------------------------------------------------------------------------------------- content

    async def resolve(self, request: Request) -> Response:
        """GET or HEAD one file. Range requests are supported."""
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
            return self.xet_file(request, self.store.blob(ref), ref.xet, auth, headers)
        return FileResponse(self.store.blob(ref), headers=headers, media_type="application/octet-stream")

    # ---------------------------------------------------------------------------------------------------- routes

    def routes(self) -> list[BaseRoute]:
        """Return the repo routes."""
        rows: list[BaseRoute] = [
            route("/api/whoami-v2", self.whoami),
            Route("/api/agent-harnesses", self.harnesses),
            Route("/api/validate-yaml", self.validate_yaml, methods=["POST"]),
            route("/api/repos/create", self.create, methods=["POST"], fields=_CREATE),
            route("/api/repos/delete", self.delete, methods=["DELETE"], fields="name organization type"),
            route("/api/repos/move", self.move, methods=["POST"], fields="fromRepo toRepo type"),
        ]
        for kind in ("models", "datasets", "spaces"):
            base = f"/api/{kind}"
            one = base + "/{repo:repo}"
            rows += [
                route(base, self.listing, query=_LISTING),
                route(one + "/revision/{rev:path}", self.info, query=_INFO),
                route(one + "/tree/{rev}", self.tree, query=_TREE),
                route(one + "/tree/{rev}/{path:path}", self.tree, query=_TREE),
                route(one + "/paths-info/{rev}", self.paths_info, methods=["POST"]),
                route(one + "/refs", self.refs, query=("include_prs",)),
                route(one + "/commits/{rev}", self.commits, query=("expand[]", "limit", "p")),
                route(one + "/auth-check", self.auth_check),
                route(one + "/settings", self.settings, methods=["PUT"], fields="private visibility gated"),
                route(one + "/branch/{rev:path}", self.make_ref, methods=["POST"]),
                route(one + "/tag/{rev:path}", self.make_ref, methods=["POST"]),
                route(one, self.info, query=_INFO),
            ]
            root = "" if kind == "models" else f"/{kind}"
            rows.append(route(root + "/{repo:repo}/resolve/{rev}/{path:path}", self.resolve, query=("download",)))
        return rows


def make_app(store: HubStore, more: list[BaseRoute]) -> Starlette:
    """Return the application for a store. The routes in `more` come first.

    A route whose path starts with a repo's name matches many paths, so such routes come last.
    """
    rows = UploadRoutes(store).routes() + RepoRoutes(store).routes()
    rows.sort(key=lambda row: isinstance(row, Route) and row.path.startswith("/{repo"))
    handlers: Any = {HubError: problem, HTTPException: problem, RepoMoved: problem}
    return Starlette(routes=more + store.xet.routes() + rows, exception_handlers=handlers)


_SORTS: dict[str, Callable[[StoredRepo], Any]] = {
    "trendingScore": lambda r: r.likes,
    "downloads": lambda r: r.downloads,
    "likes": lambda r: r.likes,
    "createdAt": lambda r: r.created_at,
    "lastModified": lambda r: r.commits[-1].at,
}


def _usable(repo_id: str) -> bool:
    return re.fullmatch(REPO_ID, repo_id) is not None and ".." not in repo_id


def _entry(path: str, ref: FileRef) -> dict[str, Any]:
    lfs = {"lfs": {"oid": ref.sha256, "size": ref.size, "pointerSize": len(ref.pointer)}} if ref.lfs else {}
    xet = {"xetHash": ref.xet} if ref.xet else {}
    return {"type": "file", "oid": ref.oid(), "size": ref.size, "path": path, **lfs, **xet}


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default
