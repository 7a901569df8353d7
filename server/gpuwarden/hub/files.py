"""List a repo's files at one commit, with the sizes and digests that the Hub reports, and read their bytes.

A listing is not proof of a file's content. A range request reads the bytes that the Hub actually stores.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from gpuwarden.checkpoints.file_model import Broken, Doubtful
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, NotFound
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.repos import REPO_ID, RepoType
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubClient, HubConfig, HubResponse

SCHEME = "hf://"
BLOCK = 128 << 10
KEPT = 64
RANGE_S = 20.0
MAX_FILES = 20_000
_PAGES = 200
_LONGEST, _DEEPEST = 4_096, 64
_KINDS: dict[str, RepoType] = {"datasets/": "dataset", "spaces/": "space", "models/": "model"}


@dataclass(frozen=True)
class Address:
    """An address on the Hub: `hf://[datasets/]owner/name[@revision][/path]`."""

    type: RepoType
    repo: str
    revision: str = "main"
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse a Hub address. Raises BadRequest if it is invalid."""
        rest, kind = text.removeprefix(SCHEME), "models/"
        for word in _KINDS:
            if rest.startswith(word):
                rest, kind = rest.removeprefix(word), word
        owner, _, more = rest.partition("/")
        name, _, path = more.partition("/")
        name, _, revision = name.partition("@")
        repo, path = f"{owner}/{name}", path.strip("/")
        odd = ".." in path.split("/") or not path.isprintable() or len(text) > 1_000
        if not text.startswith(SCHEME) or not re.fullmatch(REPO_ID, repo) or odd:
            raise BadRequest(f"{line(text, 120)!r} is not a Hub address", "Write hf://owner/name[@revision][/path].")
        return cls(_KINDS[kind], repo, unquote(revision) or "main", path)


@dataclass(frozen=True)
class HubFile:
    """A file as listed by the Hub. `sha256` is None for small files, for which git uses another hash."""

    size: int
    sha256: str | None


@dataclass(frozen=True)
class Listing:
    """The files under an address, at one commit. Paths are relative to the repo."""

    address: Address
    commit: str
    files: dict[str, HubFile]

    @property
    def bytes(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(f.size for f in self.files.values())


async def list_files(hub: HubClient, address: Address) -> Listing:
    """List the files at an address. Raises NotFound, AuthFailed, BadRequest, BadReply, or errors from `HubClient`."""
    base = f"/api/{address.type}s/{address.repo}"
    about = _good(await hub.get(f"{base}/revision/{quote(address.revision, safe='')}"), address)
    commit = str(about.json.get("sha") if isinstance(about.json, dict) else "")
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise BadReply(f"the Hub returned no commit for {address.repo}", "Try again.")
    files: dict[str, HubFile] = {}
    cursor: dict[str, str] = {}
    for _ in range(_PAGES):
        page = _good(await hub.get(f"{base}/tree/{commit}", {"recursive": "true", **cursor}), address)
        files.update(_rows(page.json))
        link = re.search(r'<([^>]+)>;\s*rel="next"', page.headers.get("link", ""))
        pairs = (item.partition("=") for item in urlsplit(link[1]).query.split("&")) if link else ()
        cursor = {name: unquote(value) for name, _, value in pairs if name in {"cursor", "limit"}}
        if len(files) > MAX_FILES:
            raise BadRequest(f"{address.repo} has more than {MAX_FILES:,} files", "Choose one of its folders.")
        if not cursor:
            break
    else:
        raise BadReply(
            f"the Hub's file list for {address.repo} has more than {_PAGES} pages", "Choose one of its folders."
        )
    inside = {p: f for p, f in files.items() if not address.path or (p + "/").startswith(address.path + "/")}
    if not inside:
        raise NotFound(
            f"{address.repo} has no files at {address.path or 'its root'} in revision {line(address.revision, 60)}",
            do(Action.LOOK_AT_REPO),
        )
    return Listing(address, commit, inside)


def _good(reply: HubResponse, address: Address) -> HubResponse:
    if reply.status == 200:
        return reply
    what = f"{address.repo} at revision {line(address.revision, 60)}"
    if reply.status == 404:
        raise NotFound(f"the Hub has no {address.type} {what} that this token can see", do(Action.LOOK_AT_REPO))
    if reply.status in {401, 403}:
        raise AuthFailed(f"the Hub denied access to {what}: {reply.message}", "Set a token with read access to it.")
    raise BadReply(f"the Hub returned HTTP {reply.status} for {what}: {reply.message}", "Try again.")


def _rows(page: Any) -> dict[str, HubFile]:
    if not isinstance(page, list):
        raise BadReply("the Hub's list of files is not a JSON list", "Try again.")
    found = {}
    for row in page:
        if not isinstance(row, dict) or row.get("type") != "file":
            continue
        path, size, lfs = row.get("path"), row.get("size"), row.get("lfs")
        if not isinstance(path, str) or type(size) is not int or size < 0:
            raise BadReply("the Hub's list of files contains a file without a path or a size", "Try again.")
        if len(path) > _LONGEST or path.count("/") > _DEEPEST:
            raise BadReply(f"the Hub lists a file whose name is too long: {line(path, 80)}", "Choose another folder.")
        digest = lfs.get("oid") if isinstance(lfs, dict) else None
        good = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)
        found[path] = HubFile(size, digest if good else None)
    return found


class RangeSource(Source):
    """A file from a listing, read on demand with range requests. Not thread-safe."""

    def __init__(
        self, listing: Listing, path: str, config: HubConfig, took: Callable[[int], None] = lambda n: None
    ) -> None:
        if path not in listing.files:
            raise Doubtful("is not in the repo")
        self.path, self.name, self.fd = Path(path), path, -1
        self.size, self.mtime_ns = listing.files[path].size, 0
        self._listing, self._config, self._took = listing, config, took
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    @property
    def url(self) -> str:
        """Return the URL of the file's content."""
        address, commit = self._listing.address, self._listing.commit
        kind = "" if address.type == "model" else f"{address.type}s/"
        return f"{self._config.endpoint}/{kind}{address.repo}/resolve/{commit}/{quote(self.name)}"

    def at(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise Broken(f"ends at byte {self.size:,}, but bytes up to {offset + length:,} are needed")
        first, last = offset // BLOCK, -(-(offset + length) // BLOCK)
        if last - first > KEPT // 2:
            return self._fetch(offset, length)
        gaps: list[list[int]] = []  # one request for each run of blocks that are not cached
        for n in (n for n in range(first, last) if n not in self._blocks):
            if gaps and gaps[-1][-1] == n - 1:
                gaps[-1].append(n)
            else:
                gaps.append([n])
        for gap in gaps:
            start = gap[0] * BLOCK
            data = self._fetch(start, min(len(gap) * BLOCK, self.size - start))
            self._blocks.update((n, data[i * BLOCK : (i + 1) * BLOCK]) for i, n in enumerate(gap))
        data = b"".join(self._blocks[n] for n in range(first, last))
        while len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        return data[offset - first * BLOCK :][:length]

    def beside(self, name: str) -> Source | None:
        """Return another file in the same folder, or None if the repo has no file with that name."""
        path = (self.path.parent / name).as_posix()
        return RangeSource(self._listing, path, self._config, self._took) if path in self._listing.files else None

    def changed(self) -> bool:
        """Return False, because a file in a commit can't change."""
        return False

    def holes(self) -> int:
        """Return 0, because a file on the Hub has no holes."""
        return 0

    def _fetch(self, offset: int, length: int) -> bytes:
        import httpx2
        from huggingface_hub.errors import OfflineModeIsEnabled
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

        if not length:
            return b""
        headers = build_hf_headers(token=self._config.sendable_token, library_name="gpuwarden")
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        try:
            with get_session().stream(
                "GET", self.url, headers=headers, timeout=RANGE_S, follow_redirects=True
            ) as reply:
                return self._body(reply, offset, length)
        except (httpx2.HTTPError, httpx2.InvalidURL, OfflineModeIsEnabled, OSError) as error:
            raise Doubtful(f"could not be read from the Hub: {type(error).__name__}") from error

    def _body(self, reply: Any, offset: int, length: int) -> bytes:
        whole = reply.status_code == 200 and length == self.size
        if reply.status_code == 416:
            raise Broken(f"the Hub lists {self.size:,} bytes, but stores fewer")
        if reply.status_code != 206 and not whole:
            raise Doubtful(f"the Hub returned HTTP {reply.status_code} to a request for part of the file")
        stored = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("content-range", ""))
        if stored and int(stored[2]) != self.size:
            raise Broken(f"the Hub lists {self.size:,} bytes, but stores {int(stored[2]):,}")
        if stored and int(stored[1]) != offset:
            raise Doubtful("the Hub did not send the requested part of the file")
        data = bytearray()
        for chunk in reply.iter_raw():  # raw, because decoding could expand a short response
            self._took(len(chunk))  # checked for each chunk, because a slow response can take days
            data += chunk
            if len(data) > length:
                raise Doubtful("the Hub sent more bytes than requested")
        if len(data) != length:
            raise Doubtful(f"the Hub sent {len(data):,} of {length:,} requested bytes")
        return bytes(data)


def download(listing: Listing, config: HubConfig) -> Path:
    """Download the listed files into huggingface_hub's cache unless they are cached. Return the snapshot's folder."""
    from huggingface_hub import snapshot_download

    address = listing.address
    exactly = [re.sub(r"([*?\[])", r"[\1]", path) for path in listing.files]  # escape wildcards
    # With a commit as the revision, no request to the Hub is needed for cached files.
    found = snapshot_download(
        address.repo, repo_type=address.type, revision=listing.commit, endpoint=config.endpoint,
        token=config.sendable_token, allow_patterns=exactly, library_name="gpuwarden",
    )  # fmt: skip
    return Path(found)
