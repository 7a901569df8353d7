"""Suggest existing ids that are similar to a missing id.

One query is not enough: the Hub searches only names, and its rules for splitting them into words are undocumented.
This module runs up to five queries concurrently and ranks the results. The queries look for the name within the
namespace, the namespace's most used repos, each of the name's two longest words in all namespaces, and the same id with
another repo type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

import anyio

from gpuwarden.core.errors import WardenError
from gpuwarden.core.repos import REPO_ID, RepoType
from gpuwarden.hub.client import HubClient

LISTED = 100
BEST = 5
GOOD_ENOUGH = 38.0


async def suggest(hub: HubClient, repo_id: str, kind: RepoType) -> tuple[str, ...]:
    """Return up to five ids, most likely first; empty if none is similar or the Hub did not respond."""
    owner, _, name = repo_id.rpartition("/")
    words = sorted(tokens(name), key=lambda w: (w.isdigit(), -len(w), w))[:2]
    queries: list[dict[str, Any]] = [{"search": word, "limit": 40, "sort": "downloads"} for word in words]
    if owner:
        queries += [{"author": owner, "search": name, "limit": 20}]
        queries += [{"author": owner, "limit": LISTED, "sort": "downloads"}]
    found: set[str] = set()
    elsewhere: list[str] = []

    async def ask(query: dict[str, Any]) -> None:
        try:
            reply = await hub.get(f"/api/{kind}s", query)
        except WardenError:
            return
        if reply.status == 200 and isinstance(reply.json, list):
            ids = (str(item.get("id")) for item in reply.json if isinstance(item, dict))
            found.update(i for i in ids if re.fullmatch(REPO_ID, i))

    async def other_type(other: RepoType) -> None:
        try:
            reply = await hub.get(f"/api/{other}s/{repo_id}", {"expand": "sha"})
        except WardenError:
            return
        if reply.status == 200:
            elsewhere.append(f"{repo_id} (it is a {other}, not a {kind})")

    async with anyio.create_task_group() as group:
        for query in queries:
            group.start_soon(ask, query)
        if kind != "space":
            group.start_soon(other_type, "dataset" if kind == "model" else "model")
    return (*elsewhere, *rank(repo_id, found - {repo_id}))[:BEST]


def rank(wanted: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidates that are similar to `wanted`, most similar first; equal scores are sorted by name."""
    scored = [(score(wanted, c), c) for c in set(candidates)]
    return [c for s, c in sorted(scored, key=lambda x: (-x[0], x[1])) if s >= GOOD_ENOUGH]


def score(wanted: str, candidate: str) -> float:
    """Return a similarity from 0 to 108. Owner and name are compared separately, so that an unrelated repo with the
    same owner gets a low score.
    """
    owner, _, name = wanted.lower().rpartition("/")
    their_owner, _, their_name = candidate.lower().rpartition("/")
    alike = 100 * SequenceMatcher(None, _flat(name), _flat(their_name)).ratio()
    mine, theirs = tokens(name), tokens(their_name) | tokens(their_owner)
    shared = 100 * len(mine & theirs) / max(1, len(mine))
    return 0.6 * alike + 0.4 * shared + (8 if owner and owner == their_owner else 0)


def tokens(name: str) -> set[str]:
    """Split a name at its separators. Return the words in lower case."""
    return {t for t in re.split(r"[^a-z0-9]+", name.lower()) if t}


def _flat(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name)
