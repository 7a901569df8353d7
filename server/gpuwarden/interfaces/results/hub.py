"""The replies of hub_repo_details and of dataset_search."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from gpuwarden.core.repos import RepoAnswer, SearchAnswer
from gpuwarden.interfaces.results.base import Result


class ReposReply(Result):
    """Repos of the Hub, one entry for each id that was asked for, without what is empty."""

    repos: list[dict[str, Any]] = Field(default_factory=list)
    requests: int = 0


class DatasetsReply(Result):
    """Datasets that a search found."""

    datasets: list[dict[str, Any]] = Field(default_factory=list)
    more: bool = False


def repos_seen(answer: RepoAnswer) -> ReposReply:
    """Return the reply to hub_repo_details. `ok` says that the question was answered, not that every repo is there."""
    return ReposReply(message=answer.note, repos=[_kept(r) for r in answer.repos], requests=answer.requests)


def datasets_found(answer: SearchAnswer) -> DatasetsReply:
    """Return the reply to dataset_search."""
    return DatasetsReply(message=answer.note, datasets=[_kept(d) for d in answer.datasets], more=answer.more)


def _kept(model: BaseModel) -> dict[str, Any]:
    """Return a model without its defaults and without what is empty."""
    full = model.model_dump(mode="json", exclude_defaults=True)
    return {k: v for k, v in full.items() if v not in (None, "", [], {})}
