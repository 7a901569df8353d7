"""Read an artifact store in a repo on the Hub: sizes and digests as the Hub lists them at one commit.

The Hub lists no SHA-256 for the small files that it stores in git; those are read completely, up to a limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

from anyio import to_thread

from gpuwarden.checkpoints.file_model import Broken, Doubtful
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, NotFound, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import MAX_MANIFEST, StoreAddress, StoredFile
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.files import Address, Listing, RangeSource, list_files

SMALL: Final = 10 << 20
"""The size limit for files that the Hub stores in git."""
MOST_READ: Final = 256 << 20
_PIECE: Final = 4 << 20


class RepoReader:
    """A `Store` that reads a repo. All reads use the first listing's commit."""

    def __init__(self, address: StoreAddress, config: HubConfig, clock: Clock) -> None:
        self._address, self._config, self._clock = address, config, clock
        self._listing: Listing | None = None

    async def reach(self) -> None:
        """Check that the repo can be read."""
        await self._list()

    async def manifest(self, key: str) -> bytes | None:
        """Return the manifest's content; None if it does not exist."""
        listing = await self._list()
        if listing is None or key not in listing.files:
            return None
        if listing.files[key].size > MAX_MANIFEST:
            raise BadReply(f"the manifest in {self._address} is longer than {MAX_MANIFEST:,} bytes")
        return await to_thread.run_sync(self._read, listing, key, abandon_on_cancel=True)

    async def files(self, keys: Sequence[str], *, read: bool = True) -> dict[str, StoredFile]:
        """Return the files in `keys` that exist. If `read` is true, read those stored in git and add their digests."""
        listing = await self._list()
        found: dict[str, StoredFile] = {}
        count = 0
        for key in keys:
            file = listing.files.get(key) if listing else None
            if listing is None or file is None:
                continue
            digest = file.sha256
            if read and digest is None and file.size <= SMALL and count + file.size <= MOST_READ:
                count += file.size
                digest = hashlib.sha256(
                    await to_thread.run_sync(self._read, listing, key, abandon_on_cancel=True)
                ).hexdigest()
            found[key] = StoredFile(file.size, digest)
        return found

    async def read(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`."""
        listing = await self._list()
        if listing is None or key not in listing.files:
            raise NotFound(f"{self._address} has no file {line(key, 200)}", "Check the store's content.")
        source = RangeSource(listing, key, self._config)
        for at in range(offset, source.size, _PIECE):
            yield await to_thread.run_sync(self._piece, source, at, abandon_on_cancel=True)

    async def _list(self) -> Listing | None:
        """Return the repo's files; None if the repo is empty. Raises NotFound if it does not exist."""
        if self._listing is None:
            address = Address("dataset" if self._address.kind == "dataset" else "model", self._address.root)
            async with HubClient(self._config, clock=self._clock) as hub:
                try:
                    self._listing = await list_files(hub, address)
                except NotFound:
                    about = await hub.get(f"/api/{address.type}s/{address.repo}")
                    if about.status != 200:
                        raise
        return self._listing

    def _read(self, listing: Listing, key: str) -> bytes:
        source = RangeSource(listing, key, self._config)
        return b"".join(self._piece(source, at) for at in range(0, source.size, _PIECE))

    def _piece(self, source: RangeSource, at: int) -> bytes:
        try:
            return source.at(at, min(_PIECE, source.size - at))
        except (Broken, Doubtful) as why:
            raise Unreachable(f"{self._address}: {line(source.name, 200)} {why}", "Try again.") from why
