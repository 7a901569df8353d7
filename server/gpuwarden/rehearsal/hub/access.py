"""Find the caller and the repo for a request to the rehearsal Hub, and return errors in the Hub's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from gpuwarden.rehearsal.hub.store import Commit, HubStore, StoredRepo, User


class HubError(Exception):
    """An error response from the Hub, with its HTTP status, message and error code."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class RepoMoved(Exception):
    """The repo was renamed; `url` is the address of the same request with the new name."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.url = url


def problem(_request: Request, error: Exception) -> Response:
    """Return the Hub's response for an error."""
    if isinstance(error, RepoMoved):
        return RedirectResponse(error.url, 307)
    if isinstance(error, HTTPException):
        error = HubError(error.status_code, error.detail)
    assert isinstance(error, HubError)
    headers = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
    return JSONResponse({"error": error.message}, error.status, headers)


class Access:
    """Finds a request's caller and repo in one store."""

    def __init__(self, store: HubStore) -> None:
        self.store = store

    def user(self, request: Request) -> User | None:
        """Return the caller; None for a request without a token. An unknown token is an error."""
        header = request.headers.get("authorization", "")
        if not header:
            return None
        user = self.store.users.get(header.removeprefix("Bearer ").strip())
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def known_user(self, request: Request) -> User:
        """Return the caller. A request without a token is an error."""
        user = self.user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        return user

    def repo(self, request: Request, *, content: bool = False, write: bool = False) -> StoredRepo:
        """Return the repo in the request's path. Raises HubError if the caller lacks the required access."""
        kind, repo_id = kind_of(request), request.path_params["repo"]
        user = self.user(request)
        repo = self.store.get(kind, repo_id)
        if repo is None or not sees(user, repo):
            new = self.store.moved_to(kind, repo_id)
            if repo is None and new:
                raise RepoMoved(str(request.url).replace(f"/{repo_id}", f"/{new}", 1))
            if user is None:
                raise HubError(401, "Invalid username or password.")
            raise HubError(404, "Repository not found", "RepoNotFound")
        if write and not (user and user.may_write(repo.owner)):
            raise HubError(403, f"You don't have the rights to write to {repo.id}")
        if content and repo.extra.get("disabled"):
            raise HubError(403, "Access to this resource is disabled.")
        inside_gate = user is not None and (user.name in repo.grants or repo.owner in {user.name, *user.orgs})
        if content and repo.gated and not inside_gate:
            message = f"Access to {kind} {repo.id} is restricted and you are not in the authorized list."
            raise HubError(403 if user else 401, message, "GatedRepo")
        return repo

    def commit(self, repo: StoredRepo, rev: str) -> Commit:
        """Return the commit that a revision refers to."""
        commit = repo.commit_of(rev)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return commit

    # ------------------------------------------------------------------------------------------------ xet store

    def xet_answer(self, *, write: bool) -> Response:
        """Return the response shared by all token routes: the token as JSON and in headers."""
        answer = self.store.xet.token(self.store.clock.now(), "write" if write else "read")
        headers = {
            "X-Xet-Cas-Url": str(answer["casUrl"]),
            "X-Xet-Access-Token": str(answer["accessToken"]),
            "X-Xet-Token-Expiration": str(answer["exp"]),
        }
        return JSONResponse(answer, headers=headers)

    def xet_file(
        self, request: Request, file: Path, xet: str, auth: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return a file's bytes or, for a client that supports xet, the file's address in the xet store."""
        where = f"{self.store.xet.url}/v1/reconstructions/{xet}"
        size = file.stat().st_size
        answered = {"ETag": f'"{xet}"', **(headers or {}), "X-Xet-Hash": xet, "X-Linked-Size": str(size)}
        answered |= {"Link": f'<{auth}>; rel="xet-auth", <{where}>; rel="xet-reconstruction-info"'}
        kind = "application/vnd.xet-fileinfo+json"
        if kind not in request.headers.get("accept", ""):
            return FileResponse(file, headers=answered, media_type="application/octet-stream")
        info = {"hash": xet, "refreshUrl": auth, "reconstructionUrl": where, "etag": answered["ETag"], "size": size}
        return JSONResponse(info, headers=answered, media_type=kind)


def kind_of(request: Request) -> str:
    """Return the repo type in a request: model, dataset or space."""
    for kind in ("dataset", "space"):
        if request.url.path.startswith((f"/api/{kind}s", f"/{kind}s/")):
            return kind
    return "model"


def sees(user: User | None, repo: StoredRepo) -> bool:
    """Return whether a caller is allowed to know that a repo exists."""
    return not repo.private or (user is not None and repo.owner in {user.name, *user.orgs})


def json_answer(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response. Values of types that JSON lacks, such as dates, are converted to strings."""
    body = json.dumps(value, default=str).encode()
    return Response(body, media_type="application/json", headers=dict(headers or {}))
