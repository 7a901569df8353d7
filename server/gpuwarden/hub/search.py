"""Search the Hub's datasets and return compact rows to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest
from gpuwarden.core.repos import DatasetRow, SearchAnswer, Sort
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubClient

MAX_ROWS = 50
_SORTS: dict[Sort, str] = {
    "trending": "trendingScore",
    "downloads": "downloads",
    "likes": "likes",
    "created": "createdAt",
    "modified": "lastModified",
}


async def dataset_search(
    query: str = "",
    author: str = "",
    tags: Sequence[str] = (),
    sort: Sort = "downloads",
    limit: int = 10,
    *,
    hub: HubClient,
) -> SearchAnswer:
    """Find datasets by words in their names, by owner and by tags (such as `task_categories:text-generation`)."""
    if not 1 <= limit <= MAX_ROWS:
        raise BadRequest(f"limit is {limit}; it must be between 1 and {MAX_ROWS}")
    if sort not in _SORTS:
        raise BadRequest(f"sort is {line(sort, 40)!r}; it must be one of {', '.join(_SORTS)}")
    if len(query) > 200 or len(author) > 96 or len(tags) > 10 or any(len(t) > 100 for t in tags):
        raise BadRequest("the query is too long", "Use up to 200 characters, and up to 10 tags of 100 characters.")
    before = hub.requests
    found = await _ask(hub, query, author, tags, sort, limit)
    note = ""
    if not found and author and query:
        # The Hub searches names only, so list the author's other datasets instead.
        found = await _ask(hub, "", author, tags, sort, limit)
        note = f"none of {author}'s datasets has {query!r} in its name; these are {author}'s datasets" if found else ""
    if not found:
        note = "no datasets found: the Hub searches only names, so try fewer or shorter words, or omit the author"
    return SearchAnswer(
        datasets=tuple(found[:limit]),
        more=len(found) > limit,
        requests=hub.requests - before,
        note=line(note, 300),
    )


async def _ask(
    hub: HubClient, query: str, author: str, tags: Sequence[str], sort: Sort, limit: int
) -> list[DatasetRow]:
    expand = ["downloads", "likes", "lastModified", "gated", "tags"]
    params: dict[str, Any] = {"sort": _SORTS[sort], "limit": limit + 1, "expand": expand}
    params |= {k: v for k, v in (("search", query), ("author", author), ("filter", list(tags))) if v}
    reply = await hub.get("/api/datasets", params)
    if reply.status in {401, 403}:
        raise AuthFailed(f"the Hub rejected the token: {reply.message}", "Check it with `hf auth whoami`.")
    if reply.status != 200 or not isinstance(reply.json, list):
        raise BadReply(f"the Hub returned HTTP {reply.status} for its dataset list: {reply.message}")
    found = []
    for item in (item for item in reply.json if isinstance(item, dict)):
        tag: dict[str, str] = {}  # the first tag of each kind
        for kind, colon, value in (t.partition(":") for t in item.get("tags") or () if isinstance(t, str)):
            if colon:
                tag.setdefault(kind, line(value, 60))
        row = DatasetRow(
            id=line(item.get("id"), 200),
            downloads=_int(item.get("downloads")),
            likes=_int(item.get("likes")),
            modified=line(item.get("lastModified") or "", 10).split(" ")[0],
            gated=bool(item.get("gated")),
            rows=tag.get("size_categories", ""),
            task=tag.get("task_categories", ""),
            format=tag.get("format", ""),
            license=tag.get("license", ""),
        )
        found.append(row)
    return found


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None
