"""Addresses of artifact stores, which keep outputs independently of the rented machine and of this machine.

A store is a path in an S3 bucket, or a repo or a bucket on the Hub.

A job's files are stored under the path and the job's id, so that no job overwrites another job's files.

| variable | meaning |
|---|---|
| `GPUWARDEN_STORE_AWS_ACCESS_KEY_ID`, `GPUWARDEN_STORE_AWS_SECRET_ACCESS_KEY` | the uploader's key for S3 |
| `GPUWARDEN_STORE_AWS_SESSION_TOKEN` | the session token of a temporary key |
| `GPUWARDEN_STORE_HF_TOKEN` | the uploader's token for the Hub |
| `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` | the key with which this machine reads S3 |
| `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL` | the endpoint of an S3-compatible store other than AWS |
| `AWS_REGION`, `AWS_DEFAULT_REGION` | the region of an S3 store |
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from gpuwarden.core.credentials import credential, without_login

MAX_MANIFEST: Final = 64 << 20
MANIFEST: Final = "gpuwarden-manifest.json"
"""The name of a store's manifest, which is written last, so every file that it lists has been stored completely."""
VERSIONS: Final = "gpuwarden-versions"
"""The folder for a job's files that are stored under another name because the manifest listed an older version."""
OWN_KEYS: Final = "GPUWARDEN_STORE_"
"""The prefix of the environment variables that contain a store's credentials."""
_REQUIRED: Final = {"s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "hf": ("HF_TOKEN",)}
_OPTIONAL: Final = {"s3": ("AWS_SESSION_TOKEN",), "hf": ()}
_PUBLIC: Final = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"),
                  "hf": ("HF_ENDPOINT",)}  # fmt: skip
Kind = Literal["model", "dataset", "bucket"]
_KINDS: Final[dict[str, Kind]] = {"models": "model", "datasets": "dataset", "buckets": "bucket"}
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,127}")


@dataclass(frozen=True)
class StoreAddress:
    """A parsed address. `root` is a bucket's name or a Hub id; `kind` applies only to the Hub."""

    scheme: Literal["s3", "hf"]
    root: str
    path: str
    kind: Kind = "model"

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse an address. Raises ValueError with the expected form."""
        scheme, mark, rest = text.partition("://")
        parts = rest.rstrip("/").split("/")
        kind = _KINDS[parts.pop(0)] if scheme == "hf" and parts[0] in _KINDS else "model"
        count = 2 if scheme == "hf" else 1
        root, path = "/".join(parts[:count]), parts[count:]
        fit = _REPO.fullmatch(root) if scheme == "hf" else _BUCKET.fullmatch(root)
        if not mark or scheme not in _REQUIRED or not fit or not all(_SEGMENT.fullmatch(part) for part in path):
            raise ValueError(
                "an artifact store must be s3://bucket/path or hf://[datasets/|buckets/]owner/name/path; "
                "the names must not contain special characters"
            )
        return cls("hf" if scheme == "hf" else "s3", root, "/".join(path), kind)

    def __str__(self) -> str:
        """Return the address as text."""
        prefix = f"{self.kind}s/" if self.scheme == "hf" and self.kind != "model" else ""
        return f"{self.scheme}://{prefix}{self.root}{'/' if self.path else ''}{self.path}"

    def key(self, job: str, path: str = "", version: str = "") -> str:
        """Return the full name of a job's file in the store. Absolute paths are stored under `machine/`, as in a pull.

        `version` comes from the file's entry in the manifest.
        """
        inside = f"machine/{path.lstrip('/')}" if path.startswith("/") else path
        inside = f"{VERSIONS}/{version}/{inside}" if version else inside
        return "/".join(part for part in (self.path, job, inside) if part)

    @staticmethod
    def reserved(path: str) -> bool:
        """Return whether the store reserves an output's path for absolute paths, versions or the manifest."""
        return path.split("/")[0] in {"machine", VERSIONS, MANIFEST}

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of the variables that must be set on this machine for the uploader."""
        return tuple(OWN_KEYS + name for name in _REQUIRED[self.scheme])

    @property
    def credentials(self) -> tuple[str, ...]:
        """Return the names of the variables whose values are secret, including optional variables."""
        return tuple(OWN_KEYS + name for name in (*_REQUIRED[self.scheme], *_OPTIONAL[self.scheme]))

    def handed(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the uploader's variables under their usual names, such as `HF_TOKEN`: credentials, endpoint, region.

        A user and password in an endpoint are removed. Raises AuthFailed for a credential that can't be sent.
        """
        secret, public = (*_REQUIRED[self.scheme], *_OPTIONAL[self.scheme]), _PUBLIC[self.scheme]
        given = {name: credential(env, OWN_KEYS + name) for name in secret}
        given |= {name: without_login(env.get(OWN_KEYS + name) or env.get(name) or "") for name in public}
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True)
class StorePattern:
    """An entry in the policy's list of stores. It covers all addresses under it; `*` matches any single name."""

    scheme: str
    kind: str
    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> StorePattern:
        """Parse an entry. Raises ValueError with the expected form."""
        scheme, mark, rest = text.partition("://")
        parts = rest.rstrip("/").split("/")
        kind = _KINDS[parts.pop(0)] if scheme == "hf" and parts[0] in _KINDS else "model"
        sound = mark and scheme in _REQUIRED and len(parts) >= (2 if scheme == "hf" else 1)
        if not sound or not all(part == "*" or _SEGMENT.fullmatch(part) for part in parts):
            raise ValueError(f"{text!r} is not a store such as s3://bucket/prefix or hf://owner/*")
        return cls(scheme, kind, tuple(parts))

    def covers(self, other: StoreAddress | StorePattern) -> bool:
        """Return whether this entry covers an address, or every address that another entry covers."""
        address = [] if isinstance(other, StorePattern) else f"{other.root}/{other.path}".split("/")
        parts = other.parts if isinstance(other, StorePattern) else tuple(filter(None, address))
        alike = (self.scheme, self.kind) == (other.scheme, other.kind) and len(parts) >= len(self.parts)
        return alike and all(own in {"*", part} for own, part in zip(self.parts, parts, strict=False))


@dataclass(frozen=True)
class StoredFile:
    """One object as its store describes it.

    `parts` is the number of parts in the upload; `parts_sha256` is the digest of their digests.
    """

    size: int
    sha256: str | None = None
    parts_sha256: str | None = None
    parts: int = 1


class Store(Protocol):
    """Read access to an artifact store. Comparing a copy with the store downloads only the manifest and small files."""

    async def reach(self) -> None:
        """Check that the store can be read. Raises a `WardenError` if it can't."""
        ...

    async def manifest(self, key: str) -> bytes | None:
        """Return the manifest's content, up to a size limit; None if the manifest does not exist."""
        ...

    async def files(self, keys: Sequence[str], *, read: bool = True) -> dict[str, StoredFile]:
        """Return the existing objects among `keys`.

        `read`: download small objects whose digest the store does not list, and compute the digest.
        """
        ...

    def read(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one object from `offset`. Raises NotFound if it is absent, Unreachable if the connection is lost."""
        ...
