"""Models for facts about Hugging Face Hub repos, which tools return and rules read.

Strings in these models are untrusted text. Their length is limited, and secrets and control characters are removed.
Blocks of text (`about`, `preview`) are fenced.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from gpuwarden.core.models import Frozen

RepoType: TypeAlias = Literal["model", "dataset", "space"]
Sort: TypeAlias = Literal["trending", "downloads", "likes", "created", "modified"]
Operation: TypeAlias = Literal["overview", "dataset_structure", "dataset_preview"]
RepoStatus: TypeAlias = Literal["ok", "missing", "gated", "private_or_missing", "renamed", "disabled", "error"]

REPO_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?"


class RepoFile(Frozen):
    """One file in a repo; `size` is None if the Hub did not report it."""

    path: str
    size: int | None = None


class Column(Frozen):
    """One column: its type in short form, such as `string`, `list<{role: string, content: string}>` or `image`."""

    name: str
    type: str


class Split(Frozen):
    """One split; `rows` is None if the dataset viewer does not report it."""

    name: str
    rows: int | None = None


class Config(Frozen):
    """One config (subset) with its splits and columns.

    If `columns` is empty, the columns are unknown, and `why` is the reason.
    """

    name: str
    splits: tuple[Split, ...] = ()
    columns: tuple[Column, ...] = ()
    why: str = ""

    @property
    def column_names(self) -> frozenset[str]:
        """Return the names of the columns."""
        return frozenset(c.name for c in self.columns)


class Structure(Frozen):
    """Facts from the dataset viewer. `partial`: only part of the dataset was read; `failed`: failed conversions.

    `known` is false if the viewer gave no usable response; `why` describes the response. `reached` is false if there
    was no response, so a retry may help.
    """

    known: bool = True
    reached: bool = True
    configs: tuple[Config, ...] = ()
    more_configs: int = 0
    partial: bool = False
    failed: tuple[str, ...] = ()
    why: str = ""


class Repo(Frozen):
    """One repo, as the Hub describes it for the token in use.

    `status` is `gated` if the repo exists but its files can't be read, `renamed` if the id redirects to `id_now`,
    `disabled` if the Hub denies its files to every token. `access` is whether files can be read; None if unknown.
    """

    id: str
    type: RepoType | None = None
    status: RepoStatus
    why: str = ""
    id_now: str = ""
    sha: str = ""
    modified: str = ""
    private: bool = False
    gated: Literal["auto", "manual", "yes"] | None = None
    access: bool | None = None
    bytes: int | None = None
    file_count: int = 0
    files: tuple[RepoFile, ...] = ()
    params: int | None = None
    dtypes: dict[str, int] = Field(default_factory=dict)
    arch: tuple[str, ...] = ()
    chat_template: bool | None = None
    license: str = ""
    task: str = ""
    library: str = ""
    base_model: tuple[str, ...] = ()
    default_config: str = ""
    tags: tuple[str, ...] = ()
    downloads: int | None = None
    likes: int | None = None
    also: tuple[RepoType, ...] = ()
    about: str = ""
    structure: Structure | None = None
    preview: str = ""
    did_you_mean: tuple[str, ...] = ()

    @property
    def exists(self) -> bool:
        """Return whether the repo exists and the Hub describes it. False for a disabled repo."""
        return self.status in {"ok", "gated", "renamed"}

    @property
    def readable(self) -> bool:
        """Return whether its files can be read with the token in use."""
        return self.status in {"ok", "renamed"} and self.access is not False


class RepoAnswer(Frozen):
    """The result of `hub_repo_details`."""

    ok: bool = True
    repos: tuple[Repo, ...]
    requests: int
    note: str = ""


class DatasetRow(Frozen):
    """One dataset in the search results, in short form."""

    id: str
    downloads: int | None = None
    likes: int | None = None
    modified: str = ""
    gated: bool = False
    rows: str = ""
    task: str = ""
    format: str = ""
    license: str = ""


class SearchAnswer(Frozen):
    """The result of `dataset_search`. `more` is true if the Hub has further matches."""

    ok: bool = True
    datasets: tuple[DatasetRow, ...]
    more: bool = False
    requests: int = 1
    note: str = ""
