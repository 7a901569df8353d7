"""Read an artifact store in a Hub bucket. Names and sizes come from the Hub's list, and bytes from range requests.

The Hub lists its own chunk hashes for a bucket's files instead of SHA-256 digests, so the list can't be compared with
the digests in a manifest. Small files are read completely, up to a limit. Larger files can only be verified by a pull,
which hashes the bytes as they arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final
from urllib.parse import quote

from anyio import to_thread

from gpuwarden.checkpoints.file_model import Broken, Doubtful
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadReply, NotFound, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import MAX_MANIFEST, StoreAddress, StoredFile
from gpuwarden.hub.client import HubClient, HubConfig, HubResponse
from gpuwarden.hub.files import Address, HubFile, Listing, RangeSource

SMALL: Final = 1 << 20
MOST_READ: Final = 64 << 20
_PATHS: Final = 500
"""Maximum number of names in one request."""
_PIECE: Final = 4 << 20


class BucketSource(RangeSource):
    """One file in a bucket, read with range requests."""

    @property
    def url(self) -> str:
        """Return the address of the file's bytes."""
        return f"{self._config.endpoint}/buckets/{self._listing.address.repo}/resolve/{quote(self.name)}"


class BucketReader:
    """A `Store` that reads a bucket.

    A bucket has no commits, so a file may change after it was listed. Comparing the file's digest detects this.
    """

    def __init__(self, address: StoreAddress, config: HubConfig, clock: Clock) -> None:
        self._address, self._config, self._clock = address, config, clock
        self._sizes: dict[str, int] = {}

    async def reach(self) -> None:
        """Check that the bucket can be read."""
        async with HubClient(self._config, clock=self._clock) as hub:
            self._good(await hub.get(f"/api/buckets/{self._address.root}"))

    async def manifest(self, key: str) -> bytes | None:
        """Return the manifest's content; None if it does not exist."""
        self._sizes.pop(key, None)
        size = (await self._listed([key])).get(key)
        if size is None:
            return None
        if size > MAX_MANIFEST:
            raise BadReply(f"the manifest in {self._address} is longer than {MAX_MANIFEST:,} bytes")
        return b"".join([piece async for piece in self.read(key)])

    async def files(self, keys: Sequence[str], *, read: bool = True) -> dict[str, StoredFile]:
        """Return the files in `keys` that exist. If `read` is true, also read the small files and add their digests."""
        found: dict[str, StoredFile] = {}
        count = 0
        for key, size in (await self._listed(keys)).items():
            digest = None
            if read and size <= SMALL and count + size <= MOST_READ:
                count += size
                digest = hashlib.sha256(b"".join([piece async for piece in self.read(key)])).hexdigest()
            found[key] = StoredFile(size, digest)
        return found

    async def read(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`."""
        if key not in self._sizes and key not in await self._listed([key]):
            raise NotFound(f"{self._address} has no file {line(key, 200)}", "Check the store's content.")
        listing = Listing(Address("model", self._address.root), "", {key: HubFile(self._sizes[key], None)})
        source = BucketSource(listing, key, self._config)
        for at in range(offset, source.size, _PIECE):
            try:
                yield await to_thread.run_sync(source.at, at, min(_PIECE, source.size - at), abandon_on_cancel=True)
            except (Broken, Doubtful) as why:
                raise Unreachable(f"{self._address}: {line(key, 200)} {why}", "Try again.") from why

    async def _listed(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the sizes of the files in `keys` that exist."""
        found: dict[str, int] = {}
        async with HubClient(self._config, clock=self._clock) as hub:
            for at in range(0, len(keys), _PATHS):
                body = {"paths": list(keys[at : at + _PATHS])}
                found |= _sizes(
                    self._good(await hub.send("POST", f"/api/buckets/{self._address.root}/paths-info", body))
                )
        found = {key: size for key, size in found.items() if key in set(keys)}
        self._sizes |= found
        return found

    def _good(self, reply: HubResponse) -> HubResponse:
        if reply.status == 200:
            return reply
        if reply.status == 404:
            raise NotFound(
                f"the Hub has no bucket {self._address.root} that this token can see", "Create it on the Hub."
            )
        if reply.status in {401, 403}:
            raise AuthFailed(
                f"the Hub denied access to {self._address}: {reply.message}", "Set a token with read access to it."
            )
        raise BadReply(f"the Hub returned HTTP {reply.status} for {self._address}: {reply.message}", "Try again.")


def _sizes(reply: HubResponse) -> dict[str, int]:
    rows: Any = reply.json
    if not isinstance(rows, list):
        raise BadReply("the Hub's list of a bucket's files is not a JSON list", "Try again.")
    files = [row for row in rows if isinstance(row, dict) and row.get("type") == "file"]
    if not all(isinstance(row.get("path"), str) and type(row.get("size")) is int and row["size"] >= 0 for row in files):
        raise BadReply("the Hub's list of a bucket has a file without a path or a size", "Try again.")
    return {row["path"]: row["size"] for row in files}
