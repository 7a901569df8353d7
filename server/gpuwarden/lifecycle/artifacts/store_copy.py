"""Compare a job's artifact store with the files on its machine, without downloading them.

The runner recomputes the digests of the machine's files; an authentic seal must match the new digest. For each file,
three checks must pass: the store's manifest lists the same content, the object exists, and the store's checksum of the
object matches that content. Otherwise, the file's state is unknown, and a reason is given.
"""

from __future__ import annotations

from typing import Final

import anyio
from pydantic import ValidationError

from gpuwarden.core.errors import AuthFailed, BadReply, NotFound, NotSupported, WardenError
from gpuwarden.core.models import Answer, Artifact, Frozen, Handle, Known, Manifest, Unknown
from gpuwarden.core.reasons import Code, Reason, because
from gpuwarden.core.sanitize import line
from gpuwarden.core.store_address import MANIFEST, StoreAddress, StoredFile
from gpuwarden.lifecycle.artifacts.seal_keys import with_authentic_seals
from gpuwarden.lifecycle.artifacts.store_contents import StoreList, StoreRow, open_store
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.timeouts import store_limit

_CODES: Final[dict[type[WardenError], Code]] = {
    NotSupported: Code.STORE_NO_CLIENT,
    AuthFailed: Code.STORE_DENIED,
    NotFound: Code.STORE_DENIED,
    BadReply: Code.STORE_INVALID,
}


class StoreCopy(Frozen):
    """Result of comparing a job's artifact store with its machine.

    `files` contains the paths of the files that are equal to the machine's, according to the store's checksum. `code`
    and `why` give the reason if the store is incomplete; they are None and "" for a complete store.
    """

    address: str
    files: frozenset[str] = frozenset()
    code: Code | None = None
    why: str = ""


async def reachable(ctx: Context, store_url: str) -> Answer[str]:
    """Return the reason why a job can't use a store: "" if the store can be read, Unknown if it does not respond."""
    try:
        with anyio.fail_after(store_limit(0)):
            await open_store(ctx, StoreAddress.parse(store_url)).reach()
    except TimeoutError:
        return Unknown(f"{store_url} sent no complete response within {store_limit(0):g} s")
    except (NotFound, AuthFailed, NotSupported) as error:
        return Known(error.message)
    except WardenError as error:
        return Unknown(error.message)
    return Known("")


async def compare_with_store(ctx: Context, job: JobRecord, handle: Handle, listed: Manifest) -> StoreCopy:
    """Compare the store with the current files on the machine."""
    store_url = job.spec.artifact_store
    try:
        there = await machine_digests(ctx, job, handle, listed)
    except WardenError as error:
        return _unknown(store_url, because(Code.STORE_MACHINE_SILENT, message=error.message))
    address, limit = StoreAddress.parse(store_url), store_limit(len(there.files))
    try:
        with anyio.fail_after(limit):
            store = open_store(ctx, address)
            content = await store.manifest(address.key(job.id, MANIFEST))
            if content is None:
                return _unknown(store_url, because(Code.STORE_EMPTY))
            rows = {row.path: row for row in StoreList.model_validate_json(content).files}
            versions = {path: row.version for path, row in rows.items()}
            keys = {f.path: address.key(job.id, f.path, versions.get(f.path, "")) for f in there.files}
            objects = await store.files(list(keys.values()))
    except TimeoutError:
        return _unknown(store_url, because(Code.STORE_UNREACHABLE, message=f"no complete response within {limit:g} s"))
    except ValidationError as error:
        return _unknown(store_url, because(Code.STORE_INVALID, message=f"{error.error_count()} invalid fields"))
    except WardenError as error:
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), Code.STORE_UNREACHABLE)
        return _unknown(store_url, because(code, message=error.message))
    found = {f.path: disagreement(f, rows.get(f.path), objects.get(keys[f.path])) for f in there.files}
    equal = frozenset(path for path, code in found.items() if code is None)
    for code in (Code.STORE_CHANGED, Code.STORE_STALE, Code.STORE_UNCHECKED, Code.STORE_INCOMPLETE):
        if paths := [path for path, trouble in found.items() if trouble is code]:
            reason = because(code, count=len(paths), path=line(paths[0], 80))
            return StoreCopy(address=store_url, files=equal, code=code, why=reason.text)
    return StoreCopy(address=store_url, files=equal)


async def machine_digests(ctx: Context, job: JobRecord, handle: Handle, listed: Manifest) -> Manifest:
    """Return the listed files with new digests, which the machine computes during this call.

    A file gets no digest if its seal, times or size don't match. A seal alone is not enough: it applies to a size and
    times, and a job can move another file with the same size and times to the sealed path.
    """
    fresh = {f.path: f for f in (await ctx.backend(handle.backend).manifest(handle, job.outputs)).files}

    def with_digest(file: Artifact) -> Artifact:
        now = fresh.get(file.path)
        if now is None or now.stamp != file.stamp or (file.sealed_at is not None and now.sha256 != file.sha256):
            return file.model_copy(update={"sha256": None})
        return now

    manifest = with_authentic_seals(ctx, job.id, listed)
    return manifest.model_copy(update={"files": tuple(with_digest(file) for file in manifest.files)})


def disagreement(file: Artifact, row: StoreRow | None, found: StoredFile | None) -> Code | None:
    """Return the reason why the store's object may differ from a file; None if the object is proven equal."""
    if row is None or found is None:
        return Code.STORE_INCOMPLETE
    if file.sha256 is None or (row.size, row.sha256) != (file.size, file.sha256.removeprefix("sha256:")):
        return Code.STORE_STALE
    if found.size != file.size:
        return Code.STORE_CHANGED
    if found.sha256 is not None:
        return None if found.sha256 == row.sha256 else Code.STORE_CHANGED
    if found.parts_sha256 is None or file.parts_sha256 is None or file.part_size is None:
        return Code.STORE_UNCHECKED
    parts = -(-file.size // file.part_size)
    return None if (found.parts, found.parts_sha256) == (parts, file.parts_sha256) else Code.STORE_CHANGED


def _unknown(store_url: str, reason: Reason) -> StoreCopy:
    return StoreCopy(address=store_url, code=reason.code, why=line(reason.text, 300))
