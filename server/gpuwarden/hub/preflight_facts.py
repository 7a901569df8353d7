"""Collect the Hub facts for the submit rules: each repo that the job names and, for a push, the token's account."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Answer, JobSpec, Known, Unknown
from gpuwarden.core.repos import REPO_ID, Repo
from gpuwarden.hub import viewer
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.details import read_repo
from gpuwarden.hub.facts import Account, HubFacts, RepoFact
from gpuwarden.static_analysis.estimate.shape import Shape, shape_of
from gpuwarden.static_analysis.hub_references import RepoUse
from gpuwarden.static_analysis.script import ScriptFacts

MOST_REPOS = 24
_DATA = re.compile(r"(?i)(^|_)data(set)?(_(id|name|repo))?$")
_MODEL = re.compile(r"(?i)(^|_)(base_?)?(model|checkpoint|adapter)(_(id|name|repo|name_or_path))?$")


async def hub_facts(
    script: ScriptFacts | None, spec: JobSpec, configured: Callable[[], HubConfig], *, clock: Clock | None = None
) -> HubFacts | None:
    """Return the Hub facts for the rules, or None if the job does not use the Hub. Never raises for Hub errors."""
    uses = _uses(script, spec)
    pushes = script.uses.pushes if script else ()
    if not uses and not pushes:
        return None
    config = configured()
    job_token = "HF_TOKEN" in {*spec.secrets, *spec.env}
    async with HubClient(config, clock=clock) as hub:
        found: dict[RepoUse, Repo] = {}
        shapes: dict[str, Shape] = {}
        account: Answer[Account] | None = None

        async def one(use: RepoUse) -> None:
            repo = await read_repo(hub, use.id, use.type, most_files=2_000)
            if use.role == "data" and repo.exists:
                repo = repo.model_copy(update={"structure": await viewer.structure(hub, repo.id_now or repo.id)})
            found[use] = repo
            if use.type == "model" and use.trains and (shape := shape_of(await read_config(hub, repo) or {})):
                shapes[use.id] = shape

        async def who() -> None:
            nonlocal account
            account = await read_account(hub)

        async with anyio.create_task_group() as group:
            for use in uses:
                group.start_soon(one, use)
            if pushes and config.token:
                group.start_soon(who)
        named = {u.id for u in found}  # adapters' base models must also exist
        bases = [
            RepoUse(base, "model", use.line, "base")
            for use, repo in found.items()
            if repo.type == "model" and "adapter_config.json" in {f.path for f in repo.files}
            for base in repo.base_model
            if re.fullmatch(REPO_ID, base) and base not in named
        ]
        bases = list(dict.fromkeys(bases))
        async with anyio.create_task_group() as group:
            for use in bases:
                group.start_soon(one, use)
    facts = tuple(RepoFact(use, found[use], shapes.get(use.id)) for use in (*uses, *bases))
    return HubFacts(facts, account, job_token)


async def read_config(hub: HubClient, repo: Repo) -> dict[str, Any] | None:
    """Return a model's config.json, or None if it can't be read."""
    if not repo.readable or "config.json" not in {f.path for f in repo.files}:
        return None
    try:
        reply = await hub.get(f"/{repo.id_now or repo.id}/resolve/{repo.sha or 'main'}/config.json")
    except WardenError:
        return None
    return reply.json if reply.status == 200 and isinstance(reply.json, dict) else None


async def read_account(hub: HubClient) -> Answer[Account]:
    """Return the token's account. If the Hub rejects the token, return a Known account with no name and role `read`."""
    try:
        reply = await hub.get("/api/whoami-v2")
    except WardenError as error:
        return Unknown(error.message)
    if reply.status in {401, 403}:
        return Known(Account(name="", role="read"))
    if reply.status != 200 or not isinstance(reply.json, dict) or not reply.json.get("name"):
        return Unknown(f"the Hub returned HTTP {reply.status} to a request for the account")
    token = (reply.json.get("auth") or {}).get("accessToken") or {}
    orgs = [o for o in reply.json.get("orgs") or () if isinstance(o, dict)]
    writable = (str(o.get("name")) for o in orgs if o.get("roleInOrg") not in {"read", "no_access"})
    pays = reply.json.get("canPay")
    return Known(
        Account(
            name=str(reply.json.get("name") or ""),
            role=str(token.get("role") or "write"),
            orgs=tuple(writable),
            pays=pays if isinstance(pays, bool) else None,
        )
    )


def _uses(script: ScriptFacts | None, spec: JobSpec) -> list[RepoUse]:
    """Return the script's uses of repos, and the repos named by environment variables."""
    uses = list(dict.fromkeys(script.uses.repos)) if script else []
    known = {(u.id, u.type) for u in uses}
    named = []
    for name, value in spec.env.items():  # for example DATASET=owner/name
        if "/" not in value or not re.fullmatch(REPO_ID, value):
            continue
        if _DATA.search(name):
            named.append(RepoUse(value, "dataset", 0, "data"))
        elif _MODEL.search(name):
            named.append(RepoUse(value, "model", 0, "adapter" if "adapter" in name.lower() else "model"))
    return [*uses, *(u for u in named if (u.id, u.type) not in known)][:MOST_REPOS]
