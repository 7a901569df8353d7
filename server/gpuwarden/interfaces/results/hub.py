"""Replies to hub_repo_details and dataset_search."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, Field

from gpuwarden.core.repos import REPO_ID, RepoAnswer, SearchAnswer
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import Result


class ReposReply(Result):
    """Repos on the Hub, one entry for each requested id, without empty values."""

    repos: list[dict[str, Any]] = Field(default_factory=list)
    requests: int = 0


class DatasetsReply(Result):
    """Datasets found by a search."""

    datasets: list[dict[str, Any]] = Field(default_factory=list)
    more: bool = False


def repos_reply(answer: RepoAnswer) -> ReposReply:
    """Return the reply to hub_repo_details. `ok` means that the request was answered, not that every repo exists."""
    return ReposReply(
        message=quoted(answer.note), repos=[_nonempty_fields(r) for r in answer.repos], requests=answer.requests
    )


def datasets_found(answer: SearchAnswer) -> DatasetsReply:
    """Return the reply to dataset_search."""
    return DatasetsReply(
        message=quoted(answer.note), datasets=[_nonempty_fields(d) for d in answer.datasets], more=answer.more
    )


IDS = frozenset({"id", "id_now", "base_model", "did_you_mean"})
FENCED = frozenset({"about", "preview"})
_REPO = re.compile(REPO_ID)


def _nonempty_fields(model: BaseModel) -> dict[str, Any]:
    """Return a model's fields without defaults and empty values. Text from Hub users is marked as untrusted."""
    full = model.model_dump(mode="json", exclude_defaults=True)
    return {k: _marked(v, k) for k, v in full.items() if v not in (None, "", [], {})}


def _marked(value: Any, field: str) -> Any:
    if isinstance(value, str):
        fenced = field in FENCED and value.startswith("<<<DATA ")
        return value if fenced or (field in IDS and _REPO.fullmatch(value)) else named(value, 400)
    if isinstance(value, dict):
        # gpuwarden defines the keys, except in tables such as dtypes. Every value in a structure is untrusted.
        return {named(k) if field == "dtypes" else k: _marked(v, field) for k, v in value.items()}
    return [_marked(item, field) for item in value] if isinstance(value, list | tuple) else value
