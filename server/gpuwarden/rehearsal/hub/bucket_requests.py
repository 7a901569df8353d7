"""The bodies of bucket requests. The field names match the Hub's API description and its client."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from gpuwarden.rehearsal.hub.strict import StrictBody

_Hash = Field(pattern=r"^[0-9a-f]{64}$")


class Cdn(StrictBody):
    """A cloud region from which a bucket's files are served."""

    provider: Literal["gcp", "aws"]
    region: Literal["us", "eu"]


class CreateBucket(StrictBody):
    """A new bucket. huggingface_hub sends `visibility`; the API description of August 2026 contains `private`."""

    private: bool | None = None
    visibility: Literal["public", "private"] | None = None
    resourceGroupId: str | None = Field(default=None, pattern=r"^[0-9a-fA-F]{24}$")  # noqa: N815
    cdn: list[Cdn] = []
    region: Literal["us", "eu"] | None = None


class Settings(StrictBody):
    """A bucket's new settings."""

    private: bool | None = None
    visibility: Literal["public", "private"] | None = None
    cdnRegions: list[Cdn] = []  # noqa: N815


class AddFile(StrictBody):
    """An operation that adds a file whose content is in the xet store."""

    type: Literal["addFile"]
    path: str
    xetHash: str = _Hash  # noqa: N815
    mtime: int | None = None
    mtimeNanos: int | None = None  # noqa: N815
    contentType: str | None = None  # noqa: N815


class CopyFile(StrictBody):
    """An operation that copies a file from another bucket or repo. The hash identifies the file."""

    type: Literal["copyFile"]
    path: str
    xetHash: str = _Hash  # noqa: N815
    sourceRepoType: Literal["model", "dataset", "space", "bucket"]  # noqa: N815
    sourceRepoId: str  # noqa: N815
    mtime: int | None = None
    mtimeNanos: int | None = None  # noqa: N815
    contentType: str | None = None  # noqa: N815


class DeleteFile(StrictBody):
    """An operation that deletes a file."""

    type: Literal["deleteFile"]
    path: str


Operation: TypeAlias = AddFile | CopyFile | DeleteFile
