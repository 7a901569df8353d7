"""The content store that hf_xet uses: xorbs and shards, with the CAS service's published protocol.

Clients split files into chunks, compress and hash them, and upload them in xorbs. This store keeps the xorbs, reads the
list of files from the uploaded shards, and returns the byte ranges of the xorbs that make up a file. The Hub itself is
also a client: it reads and writes content through the real hf_xet, in a thread, because it must answer that client's
requests at the same time.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

EMPTY: Final = "0" * 64
"""The hash of an empty file, which is never stored."""
_TOKENS: Final = {"read": "xet-rehearsal-read", "write": "xet-rehearsal-write"}
_HEADER_AT = 48  # the shard header; 48-byte records follow it
_RECORD = 48
_VERIFIED, _WITH_SHA = 0x80000000, 0x40000000
_VERSION: Final = "X-Xet-Reconstruction-Version"
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Segment:
    """A range of consecutive chunks in a xorb."""

    xorb: str
    size: int
    first: int
    end: int


@dataclass(frozen=True)
class ShardFile:
    """One file that a shard lists. `sha256` is empty if the client omitted it."""

    xet: str
    sha256: str
    segments: tuple[Segment, ...]


class XetStore:
    """The xorbs and shards of one Hub. `hub` is the Hub's address.

    Clients cache chunks by the store's address, so each store has a unique address.
    """

    def __init__(self, folder: Path, blobs: Path) -> None:
        self.folder = folder
        self.blobs = blobs
        self.hub = ""
        self._files: dict[str, ShardFile] = {}
        for kind in ("xorbs", "shards"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        name = folder / "name"
        if not name.exists():
            name.write_text(secrets.token_hex(8))
        self.base = f"/_cas/{name.read_text()}"
        for shard in (folder / "shards").iterdir():
            self._files |= {file.xet: file for file in shard_files(shard.read_bytes())}

    @property
    def url(self) -> str:
        """Return the store's address."""
        return self.hub + self.base

    def token(self, now: float, scope: str) -> dict[str, Any]:
        """Return an access token for the store, in the format of the token routes."""
        return {"casUrl": self.url, "exp": int(now) + 3600, "accessToken": _TOKENS[scope]}

    # ---------------------------------------------------------------------------------- content, from a thread only

    def fetch(self, sha: str) -> str:
        """Copy the uploaded file with the digest `sha` into the blobs. Return its xet hash, or an empty string if there
        is no such file.
        """
        for file in self._files.values():
            if file.sha256 == sha:
                part = self.blobs / f"{sha}.xet"
                self.save(file.xet, part)
                if hashlib.sha256(part.read_bytes()).hexdigest() == sha:
                    part.replace(self.blobs / sha)
                    return file.xet
                part.unlink()
        return ""

    def save(self, xet: str, target: Path) -> None:
        """Write the content with this xet hash to `target`. Raises KeyError if the content was never uploaded."""
        import hf_xet

        if xet == EMPTY:
            target.write_bytes(b"")
            return
        if xet not in self._files:
            raise KeyError(f"xet hash {xet} was not uploaded")
        with hf_xet.XetSession().new_file_download_group(*self._login("read")) as group:
            group.start_download_file(hf_xet.XetFileInfo(xet, None), str(target))

    def add(self, file: Path) -> str:
        """Upload a local file and return its xet hash."""
        import hf_xet

        with hf_xet.XetSession().new_upload_commit(*self._login("write")) as commit:
            handle = commit.start_upload_file(str(file), sha256=hf_xet.SKIP_SHA256)
        return str(handle.result().xet_info.hash)

    def _login(self, scope: str) -> tuple[str, str, int]:
        return self.url, _TOKENS[scope], 2**40

    # ---------------------------------------------------------------------------------------------------- routes

    def routes(self) -> list[BaseRoute]:
        """Return the store's routes."""
        return [
            Route(self.base + "/v1/xorbs/default/{hash}", self._xorb, methods=["POST"]),
            Route(self.base + "/v1/shards", self._shard, methods=["POST"]),
            Route(self.base + "/v1/reconstructions/{hash}", self._reconstruction),
            Route(self.base + "/v2/reconstructions/{hash}", self._reconstruction),
            Route(self.base + "/v1/chunks/{prefix}/{hash}", self._chunk),
            Route(self.base + "/xorbs/{hash}", self._bytes),
        ]

    async def _xorb(self, request: Request) -> Response:
        if (refusal := _refused(request, "write")) is not None:
            return refusal
        target = self.folder / "xorbs" / request.path_params["hash"]
        new = not target.exists()
        part = target.with_suffix(".part")
        part.write_bytes(await request.body())
        part.replace(target)
        return JSONResponse({"was_inserted": new})

    async def _shard(self, request: Request) -> Response:
        if (refusal := _refused(request, "write")) is not None:
            return refusal
        body = await request.body()
        files = list(shard_files(body))
        wanted = {segment.xorb for file in files for segment in file.segments}
        if missing := [xorb for xorb in wanted if not (self.folder / "xorbs" / xorb).exists()]:
            return JSONResponse({"error": f"xorb {missing[0]} was not uploaded"}, 400)
        (self.folder / "shards" / hashlib.sha256(body).hexdigest()).write_bytes(body)
        self._files |= {file.xet: file for file in files}
        return JSONResponse({"result": 1})

    async def _chunk(self, request: Request) -> Response:
        """Return whether a chunk is already stored. The response is always 404, so that clients upload every chunk."""
        return _refused(request, "read") or JSONResponse({"error": "chunk not tracked"}, 404)

    async def _bytes(self, request: Request) -> Response:
        """Return a xorb, or the requested byte ranges."""
        target = self.folder / "xorbs" / request.path_params["hash"]
        if not _HASH.fullmatch(request.path_params["hash"]) or not target.exists():
            return JSONResponse({"error": "not found"}, 404)
        return FileResponse(target, media_type="application/octet-stream")

    async def _reconstruction(self, request: Request) -> Response:
        """Return the byte ranges of the xorbs that make up a file, in the version 1 or 2 format."""
        if (refusal := _refused(request, "read")) is not None:
            return refusal
        file = self._files.get(request.path_params["hash"])
        if file is None:
            return JSONResponse({"error": "file not found"}, 404)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)?", request.headers.get("range", ""))
        first, last = (int(asked[1]), int(asked[2] or 2**62)) if asked else (0, 2**62)
        terms, at, skipped = [], 0, None
        for segment in file.segments:
            if at + segment.size > first and at <= last:
                skipped = first - at if skipped is None else skipped
                terms.append(segment)
            at += segment.size
        if not terms and first:
            return JSONResponse({"error": "the range is outside of the file"}, 416)
        body: dict[str, Any] = {"offset_into_first_range": max(0, skipped or 0)}
        body["terms"] = [
            {"hash": t.xorb, "unpacked_length": t.size, "range": {"start": t.first, "end": t.end}} for t in terms
        ]
        newer = request.url.path.startswith(f"{self.base}/v2") or request.headers.get(_VERSION) == "2"
        fetch: dict[str, list[dict[str, Any]]] = {}
        for xorb in dict.fromkeys(term.xorb for term in terms):
            url, ranges = f"{self.url}/xorbs/{xorb}", self._ranges(xorb, terms)
            if newer:
                # The API description wraps this list in an object with the key `fetch`; hf_xet 1.8 and the JavaScript
                # client expect the bare list.
                fetch[xorb] = [{"url": url, "ranges": [{"chunks": c, "bytes": b} for c, b in ranges]}]
            else:
                fetch[xorb] = [{"range": c, "url": url, "url_range": b} for c, b in ranges]
        body["xorbs" if newer else "fetch_info"] = fetch
        headers = {_VERSION: "2" if newer else "1"}
        return Response(json.dumps(body), media_type="application/json", headers=headers)

    def _ranges(self, xorb: str, terms: list[Segment]) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Return the chunk ranges of a xorb that the terms use, each with its byte range."""
        runs: list[list[int]] = []
        for first, end in sorted((t.first, t.end) for t in terms if t.xorb == xorb):
            if runs and first <= runs[-1][1]:
                runs[-1][1] = max(end, runs[-1][1])
            else:
                runs.append([first, end])
        starts = [0]
        with (self.folder / "xorbs" / xorb).open("rb") as file:
            while len(starts) <= runs[-1][1]:  # the 8-byte header of a chunk contains its length
                file.seek(starts[-1])
                starts.append(starts[-1] + 8 + int.from_bytes(file.read(8)[1:4], "little"))
        return [({"start": first, "end": end}, {"start": starts[first], "end": starts[end] - 1}) for first, end in runs]


def shard_files(shard: bytes) -> Iterator[ShardFile]:
    """Yield the files in a shard's file section."""
    at = _HEADER_AT
    while at + _RECORD <= len(shard):
        record = shard[at : at + _RECORD]
        flags, entries = struct.unpack_from("<II", record, 32)
        if record[:32] == b"\xff" * 32:
            return
        segments = []
        for n in range(1, entries + 1):
            size, first, end = struct.unpack_from("<III", shard, at + _RECORD * n + 36)
            segments.append(Segment(_hex(shard[at + _RECORD * n :][:32]), size, first, end))
        at += _RECORD * (1 + entries * (2 if flags & _VERIFIED else 1))
        sha = ""
        if flags & _WITH_SHA:
            sha = _hex(shard[at : at + 32])
            at += _RECORD
        yield ShardFile(_hex(record[:32]), sha, tuple(segments))


def _refused(request: Request, scope: str) -> Response | None:
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token not in _TOKENS.values():
        return JSONResponse({"error": "unauthorized"}, 401)
    if scope == "write" and token != _TOKENS["write"]:
        return JSONResponse({"error": "the token does not allow this"}, 403)
    if "hash" in request.path_params and not _HASH.fullmatch(request.path_params["hash"]):
        return JSONResponse({"error": "malformed hash"}, 400)
    return None


def _hex(raw: bytes) -> str:
    """Return a hash as hf_xet prints it: four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))
