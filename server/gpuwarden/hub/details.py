"""Look up repos: their existence, access and content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import anyio

from gpuwarden.core.errors import BadRequest, RateLimited, WardenError
from gpuwarden.core.repos import REPO_ID, Operation, Repo, RepoAnswer, RepoFile, RepoType
from gpuwarden.core.sanitize import fence, line
from gpuwarden.hub import viewer
from gpuwarden.hub.client import HubClient, HubResponse
from gpuwarden.hub.suggest import suggest

MAX_IDS = 10
MAX_FILES = 40
MAX_TAGS = 24
_DISABLED = "the Hub has disabled this repo, so its files can't be read"
_GATES = {"auto": "auto", "manual": "manual", True: "yes"}


async def repo_details(
    ids: Sequence[str],
    type: RepoType | None = None,  # noqa: A002  (agents know this name from the Hub's own tools)
    operations: Sequence[Operation] = ("overview",),
    config: str | None = None,
    split: str | None = None,
    offset: int = 0,
    limit: int = 5,
    *,
    hub: HubClient,
) -> RepoAnswer:
    """Look up 1 to 10 repos at once. If `type` is None, an overview looks up a repo as a model and as a dataset; the
    other operations look it up as a dataset.

    `offset` and `limit` (1 to 100) select the rows of `dataset_preview`. A repo that can't be read has status `error`;
    the call itself raises only `BadRequest`, for invalid arguments.
    """
    if not 1 <= len(ids) <= MAX_IDS:
        raise BadRequest(f"{len(ids)} ids were given; pass 1 to {MAX_IDS} ids per call")
    if type is not None and type not in get_args(RepoType):
        raise BadRequest(f"type is {line(type, 40)!r}; it must be one of {', '.join(get_args(RepoType))}")
    if unknown := [o for o in operations if o not in get_args(Operation)]:
        raise BadRequest(f"unknown operation {line(unknown[0], 40)!r}; use one of {', '.join(get_args(Operation))}")
    if not operations:
        raise BadRequest("no operation was given", f"Use one of {', '.join(get_args(Operation))}.")
    if offset < 0 or not 1 <= limit <= 100:
        raise BadRequest(f"offset is {offset} and limit is {limit}; offset must be at least 0, and limit 1 to 100")
    before = hub.requests
    found: dict[str, Repo] = {}

    async def one(repo_id: str) -> None:
        repo = await read_repo(hub, repo_id, "dataset" if type is None and set(operations) - {"overview"} else type)
        if repo.type == "dataset" and repo.exists:
            repo = await _rows(hub, repo, operations, config=config, split=split, offset=offset, limit=limit)
        found[repo_id] = repo

    async with anyio.create_task_group() as group:
        for repo_id in dict.fromkeys(ids):
            group.start_soon(one, repo_id)
    repos = tuple(found[i] for i in dict.fromkeys(ids))
    return RepoAnswer(repos=repos, requests=hub.requests - before, note=hub.note)


async def read_repo(
    hub: HubClient,
    repo_id: str,
    type: RepoType | None = None,  # noqa: A002
    most_files: int = MAX_FILES,
) -> Repo:
    """Return one repo, without rows. Hub errors are not raised; the repo then has status `error` and the reason."""
    if not re.fullmatch(REPO_ID, repo_id) or ".." in repo_id or "--" in repo_id:
        return Repo(
            id=line(repo_id, 120), type=type, status="error", why="this is not a repo id; use the form owner/name"
        )
    try:
        return await _read_repo(hub, repo_id, type, most_files)
    except RateLimited as limited:
        when = f" Try again in {limited.after_s:.0f} s." if limited.after_s else ""
        return Repo(id=repo_id, type=type, status="error", why=limited.message + "." + when)
    except WardenError as error:
        return Repo(id=repo_id, type=type, status="error", why=error.message)


async def _read_repo(hub: HubClient, repo_id: str, type: RepoType | None, most_files: int) -> Repo:  # noqa: A002
    kinds: tuple[RepoType, ...] = (type,) if type else ("model", "dataset")
    replies: dict[RepoType, HubResponse] = {}
    failures: list[WardenError] = []

    async def ask(kind: RepoType) -> None:
        try:
            replies[kind] = await hub.get(f"/api/{kind}s/{repo_id}", {"blobs": "true"})
        except WardenError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        for kind in kinds:
            group.start_soon(ask, kind)
    there = [k for k in kinds if k in replies and replies[k].status == 200 and isinstance(replies[k].json, dict)]
    if there:
        repo = _read(repo_id, there[0], replies[there[0]].json, most_files).model_copy(
            update={"also": tuple(there[1:])}
        )
        return await _with_access(hub, repo)
    if failures:
        raise failures[0]
    return await _absent(hub, repo_id, kinds[0] if type else None, replies[kinds[0]])


async def _absent(hub: HubClient, repo_id: str, kind: RepoType | None, reply: HubResponse) -> Repo:
    if reply.status == 401 and "credentials" in reply.message.lower():
        return Repo(id=repo_id, type=kind, status="error", why=f"the Hub rejected the token: {reply.message}")
    if reply.status == 403 and "is disabled" in reply.message:
        return Repo(id=repo_id, type=kind, status="disabled", access=False, why=_DISABLED)
    if reply.status == 403:
        return Repo(id=repo_id, type=kind, status="error", why=f"the Hub denied access: {reply.message}")
    if reply.status not in {401, 404}:
        return Repo(id=repo_id, type=kind, status="error", why=f"the Hub returned HTTP {reply.status}: {reply.message}")
    near: list[str] = []
    for k in (kind,) if kind else ("dataset", "model"):
        near += await suggest(hub, repo_id, k)
    what = kind or "model or dataset"
    if reply.status == 401 or not hub.config.token:
        why = f"the Hub has no public {what} with this id; a token is needed to see private repos"
        return Repo(id=repo_id, type=kind, status="private_or_missing", why=why, did_you_mean=_unique(near))
    why = f"the Hub has no {what} with this id that the token in use can see"
    return Repo(id=repo_id, type=kind, status="missing", why=why, did_you_mean=_unique(near))


async def _with_access(hub: HubClient, repo: Repo) -> Repo:
    """Check whether a gated repo's files can be read; its description is always public."""
    if repo.status == "disabled":
        return repo
    if repo.gated is None:
        return repo.model_copy(update={"access": True})
    if not hub.config.token:
        return repo.model_copy(update={"status": "gated", "access": False, "why": "gated, and no token is in use"})
    try:
        reply = await hub.get(f"/api/{repo.type}s/{repo.id_now or repo.id}/auth-check")
    except WardenError as error:
        return repo.model_copy(update={"why": f"gated; access could not be checked: {error.message}"})
    if reply.status == 200:
        return repo.model_copy(update={"access": True})
    if reply.status in {401, 403}:
        why = f"gated, and the token in use has no access: {reply.message}"
        return repo.model_copy(update={"status": "gated", "access": False, "why": why})
    return repo.model_copy(update={"why": f"gated; access could not be checked: {reply.message}"})


def _read(asked: str, kind: RepoType, info: Mapping[str, Any], most_files: int) -> Repo:
    card = info.get("cardData") if isinstance(info.get("cardData"), dict) else {}
    assert isinstance(card, dict)
    tags = tuple(line(t, 80) for t in _list(info.get("tags")))
    id_now = line(info.get("id") or "", 200)
    renamed = bool(id_now) and id_now != asked
    siblings = [s for s in _list(info.get("siblings")) if isinstance(s, dict)]
    files = [RepoFile(path=line(s.get("rfilename") or "?", 200), size=_int(s.get("size"))) for s in siblings]
    sizes = [f.size for f in files]
    weights = info.get("safetensors") if isinstance(info.get("safetensors"), dict) else {}
    assert isinstance(weights, dict)
    about = info.get("description")
    tagged = next((t.removeprefix("license:") for t in tags if t.startswith("license:")), "")
    named = card.get("license")
    configs = [c for c in _list(card.get("configs")) if isinstance(c, dict)]
    disabled = info.get("disabled") is True
    return Repo(
        id=asked,
        type=kind,
        status="disabled" if disabled else "renamed" if renamed else "ok",
        access=False if disabled else None,
        why=_DISABLED if disabled else f"this id redirects; the repo is now called {id_now}" if renamed else "",
        id_now=id_now if renamed else "",
        sha=line(info.get("sha") or "", 40),
        modified=line(info.get("lastModified") or "", 24),
        private=info.get("private") is True,
        gated=_GATES.get(info.get("gated") or ""),  # type: ignore[arg-type]
        bytes=sum(s for s in sizes if s) if files and all(s is not None for s in sizes) else None,
        file_count=len(files),
        files=tuple(files[:most_files]),
        params=_int(weights.get("total")),
        dtypes={line(k, 20): v for k, v in list(_dict(weights.get("parameters")).items())[:12] if _int(v) is not None},
        license=line((named[0] if isinstance(named, list) and named else named) or tagged, 80),
        task=line(info.get("pipeline_tag") or "", 60),
        library=line(info.get("library_name") or "", 60),
        default_config=next((line(c.get("config_name") or "", 120) for c in configs if c.get("default") is True), ""),
        base_model=tuple(line(b, 200) for b in _list(card.get("base_model"))[:4]),
        tags=tags[:MAX_TAGS],
        downloads=_int(info.get("downloads")),
        likes=_int(info.get("likes")),
        about=fence(about, f"description of {id_now or asked}", limit=600, keep="start")
        if isinstance(about, str) and about.strip()
        else "",
        **_model_facts(kind, info),
    )


def _model_facts(kind: RepoType, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `arch` and `chat_template` of a model, based on the Hub's summary of the config."""
    settings = _dict(info.get("config"))
    if kind != "model" or not settings:
        return {}
    names = {s.get("rfilename") for s in _list(info.get("siblings")) if isinstance(s, dict)}
    template = "tokenizer_config" in settings and "chat_template" in _dict(settings["tokenizer_config"])
    has = template or "chat_template_jinja" in settings or "chat_template.jinja" in names
    return {
        "arch": tuple(line(a, 80) for a in _list(settings.get("architectures"))[:3]),
        "chat_template": True if has else False if "tokenizer_config" in settings else None,
    }


async def _rows(
    hub: HubClient,
    repo: Repo,
    operations: Sequence[Operation],
    *,
    config: str | None,
    split: str | None,
    offset: int,
    limit: int,
) -> Repo:
    """Return the repo with the requested facts from the dataset viewer."""
    name = repo.id_now or repo.id
    found: dict[str, Any] = {}

    async def add_structure() -> None:
        found["structure"] = await viewer.structure(hub, name, config)

    async def add_preview() -> None:
        try:
            found["preview"], _ = await viewer.preview(hub, name, config, split, offset, limit)
        except WardenError as error:
            found["preview"] = f"no rows: {error.message}"

    async with anyio.create_task_group() as group:
        if "dataset_structure" in operations:
            group.start_soon(add_structure)
        if "dataset_preview" in operations:
            group.start_soon(add_preview)
    return repo.model_copy(update=found)


def _unique(ids: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(ids))[:5]


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, str) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
