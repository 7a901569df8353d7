"""The repos of the rehearsal Hub on disk: contents by digest, commits as lists of files, and renamed repos.

`<root>/blobs/<sha256>` contains the content of one file, `<root>/repos/<type>/<owner>/<name>.json` one repo, and
`<root>/moved.json` the old names of renamed repos. A repo's description (tags, license, parameters, columns) is derived
from its own files, as on the real Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.rehearsal.hub.xet import XetStore

_BINARY = "safetensors bin pt pth ckpt gguf parquet arrow onnx png jpg jpeg zip tar gz npz npy"
LFS_SUFFIXES = frozenset(f".{name}" for name in _BINARY.split())
LFS_BYTES = 10 << 20


@dataclass
class FileRef:
    """One file in a commit."""

    sha256: str
    size: int
    lfs: bool = False
    xet: str = ""
    git: str = ""
    """The git blob id of the content; empty for a file that was uploaded through LFS."""

    @property
    def pointer(self) -> bytes:
        """Return the Git LFS pointer file."""
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {self.size}", "")
        return "\n".join(lines).encode()

    def oid(self) -> str:
        """Return the git blob id of the content or, for an LFS file, of its pointer."""
        return git_blob(self.pointer) if self.lfs else self.git


@dataclass
class Commit:
    """One commit: its id, and all files in the repo at that point."""

    oid: str
    at: float
    title: str
    files: dict[str, FileRef]


@dataclass
class StoredRepo:
    """One repo. `grants` lists the users who may read a gated repo; `extra` overrides fields of its description."""

    id: str
    type: str
    internal_id: str
    private: bool = False
    gated: str | bool = False
    grants: list[str] = field(default_factory=list)
    downloads: int = 0
    likes: int = 0
    created_at: float = 0.0
    commits: list[Commit] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Return the namespace; empty for an old id without a namespace."""
        return self.id.rpartition("/")[0]

    def commit_of(self, rev: str) -> Commit | None:
        """Return the commit that a branch, a tag or a full commit id refers to. HEAD is main."""
        oid = self.branches.get("main" if rev == "HEAD" else rev) or self.tags.get(rev) or rev
        return next((c for c in self.commits if c.oid == oid), None)


@dataclass(frozen=True)
class User:
    """The user that a token belongs to."""

    name: str
    role: str = "write"
    orgs: tuple[str, ...] = ()

    def may_write(self, owner: str) -> bool:
        """Return whether this user may write to a namespace."""
        return self.role == "write" and (owner == self.name or owner in self.orgs)


class HubStore:
    """All repos and users of one rehearsal Hub."""

    def __init__(self, root: Path, clock: Clock | None = None) -> None:
        self.root = root
        self.clock = clock or SystemClock()
        self.users: dict[str, User] = {}
        self._lock = threading.RLock()
        self.blobs = root / "blobs"
        self.blobs.mkdir(parents=True, exist_ok=True)
        self.xet = XetStore(root / "cas", self.blobs)
        self._moved_file = root / "moved.json"
        self.moved: dict[str, str] = _load(self._moved_file) or {}
        self._repos: dict[tuple[str, str], StoredRepo] = {}
        for path in sorted((root / "repos").rglob("*.json")):
            raw = _load(path) or {}
            for commit in raw["commits"]:
                commit["files"] = {p: FileRef(**f) for p, f in commit["files"].items()}
            raw["commits"] = [Commit(**c) for c in raw["commits"]]
            repo = StoredRepo(**raw)
            self._repos[repo.type, repo.id] = repo

    # ---------------------------------------------------------------------------------------------------- repos

    def add_user(self, token: str, name: str, role: str = "write", orgs: Iterable[str] = ()) -> User:
        """Add a user with a token and return the user. Tokens start with `hf_`, because clients check this prefix."""
        self.users[token] = user = User(name, role, tuple(orgs))
        return user

    def get(self, kind: str, repo_id: str) -> StoredRepo | None:
        """Return the repo whose current id is `repo_id`."""
        return self._repos.get((kind, repo_id))

    def moved_to(self, kind: str, repo_id: str) -> str | None:
        """Return the current id of a repo that was renamed, possibly more than once; None if it was not renamed."""
        seen = set()
        while (found := self.moved.get(f"{kind}:{repo_id}")) and repo_id not in seen:
            seen.add(repo_id)
            repo_id = found
        return repo_id if seen else None

    def alias(self, kind: str, old_id: str, repo_id: str) -> None:
        """Redirect requests for an old id to `repo_id`."""
        with self._lock:
            self.moved[f"{kind}:{old_id}"] = repo_id
            self.moved.pop(f"{kind}:{repo_id}", None)
            _save(self._moved_file, self.moved)

    def repos(self, kind: str) -> list[StoredRepo]:
        """Return all repos of a type."""
        return [r for (k, _), r in self._repos.items() if k == kind]

    def create(self, kind: str, repo_id: str, **fields: Any) -> StoredRepo:
        """Create a repo with one empty commit and return it."""
        with self._lock:
            if (kind, repo_id) in self._repos:
                raise FileExistsError(repo_id)
            repo = StoredRepo(repo_id, kind, secrets.token_hex(12), created_at=self.clock.now(), **fields)
            self._repos[(kind, repo_id)] = repo
            self.commit(repo, {}, "initial commit")
            return repo

    def delete(self, repo: StoredRepo) -> None:
        """Remove a repo. Its blobs are kept."""
        with self._lock:
            self._repos.pop((repo.type, repo.id), None)
            self._file(repo).unlink(missing_ok=True)

    def move(self, repo: StoredRepo, new_id: str) -> None:
        """Rename a repo. Requests for the old id are then redirected."""
        with self._lock:
            self.delete(repo)
            self.alias(repo.type, repo.id, new_id)
            repo.id = new_id
            self._repos[(repo.type, new_id)] = repo
            self.save(repo)

    def put(self, kind: str, repo_id: str, files: Mapping[str, bytes | str], **fields: Any) -> StoredRepo:
        """Create a repo if it does not exist, and commit files to it. Used for seeding."""
        repo = self.get(kind, repo_id) or self.create(kind, repo_id, **fields)
        refs = {p: self.add_blob(c.encode() if isinstance(c, str) else c, p) for p, c in files.items()}
        self.commit(repo, refs, "add files")
        return repo

    def commit(
        self, repo: StoredRepo, added: Mapping[str, FileRef], title: str, removed: Iterable[str] = (), rev: str = "main"
    ) -> Commit:
        """Add one commit to a branch. A path in `removed` that ends in `/` is a folder."""
        with self._lock:
            before = repo.commit_of(rev)
            files = dict(before.files) if before else {}
            for gone in removed:
                files = {p: f for p, f in files.items() if p != gone and not (gone[-1:] == "/" and p.startswith(gone))}
            files |= added
            seed = json.dumps([repo.internal_id, title, len(repo.commits), sorted(files)]).encode()
            commit = Commit(hashlib.sha1(seed).hexdigest(), self.clock.now(), title, files)  # noqa: S324
            repo.commits.append(commit)
            repo.branches[rev] = commit.oid
            self.save(repo)
            return commit

    def save(self, repo: StoredRepo) -> None:
        """Save a repo's description and commits to its file."""
        _save(self._file(repo), asdict(repo))

    def _file(self, repo: StoredRepo) -> Path:
        return self.root / "repos" / repo.type / f"{repo.id}.json"

    # ---------------------------------------------------------------------------------------------------- blobs

    def add_blob(self, content: bytes, path: str = "") -> FileRef:
        """Store content. The file's path and size determine whether it is an LFS file."""
        sha = hashlib.sha256(content).hexdigest()
        target = self.blobs / sha
        if not target.exists():
            part = target.with_name(f"{sha}.{secrets.token_hex(4)}.part")
            part.write_bytes(content)
            part.replace(target)
        return FileRef(sha, len(content), wants_lfs(path, len(content)), git=git_blob(content))

    def blob(self, ref: FileRef) -> Path:
        """Return the path of the blob that contains a file's content."""
        return self.blobs / ref.sha256

    def text(self, repo: StoredRepo, path: str, rev: str = "main") -> str:
        """Return the text of a file in a repo, or an empty string if the file is missing or too large."""
        commit = repo.commit_of(rev)
        ref = commit.files.get(path) if commit else None
        return self.blob(ref).read_text("utf-8", "replace") if ref and ref.size < (4 << 20) else ""

    # ---------------------------------------------------------------------------------------------- description

    def describe(self, repo: StoredRepo, commit: Commit, *, blobs: bool) -> dict[str, Any]:
        """Return the response of the repo-info route."""
        card = front_matter(self.text(repo, "README.md", commit.oid))
        siblings: list[dict[str, Any]] = []
        for path, ref in sorted(commit.files.items()):
            siblings.append({"rfilename": path})
            if blobs:
                siblings[-1] |= {"size": ref.size, "blobId": ref.oid()}
            if blobs and ref.lfs:
                siblings[-1]["lfs"] = {"sha256": ref.sha256, "size": ref.size, "pointerSize": len(ref.pointer)}
        info: dict[str, Any] = {
            "_id": repo.internal_id,
            "id": repo.id,
            "author": repo.owner or "nobody",
            "sha": commit.oid,
            "lastModified": iso(commit.at),
            "createdAt": iso(repo.created_at),
            "private": repo.private,
            "gated": repo.gated,
            "disabled": False,
            "downloads": repo.downloads,
            "likes": repo.likes,
            "tags": self.tags_of(repo, commit, card),
            "cardData": card,
            "siblings": siblings,
            "usedStorage": sum(f.size for f in commit.files.values()),
        }
        if repo.type == "model":
            info |= self._model_facts(repo, commit, card)
        else:
            body = re.sub(r"\A---\n.*?\n---\n", "", self.text(repo, "README.md", commit.oid), flags=re.DOTALL)
            info["description"] = body.strip()[:2_000]
        return info | repo.extra

    def tags_of(self, repo: StoredRepo, commit: Commit, card: Mapping[str, Any]) -> list[str]:
        """Return the tags that the Hub would derive from the card and the files."""
        tags = [str(t) for t in _list(card.get("tags"))]
        for key in ("task_categories", "size_categories", "language", "license"):
            tags += [f"{key}:{v}" for v in _list(card.get(key))]
        suffixes = {Path(p).suffix for p in commit.files}
        tags += [f"format:{s[1:]}" for s in sorted(suffixes & {".parquet", ".json", ".csv"})]
        return tags + (["safetensors"] if ".safetensors" in suffixes else [])

    def _model_facts(self, repo: StoredRepo, commit: Commit, card: Mapping[str, Any]) -> dict[str, Any]:
        facts: dict[str, Any] = {"modelId": repo.id}
        facts |= {k: card[k] for k in ("pipeline_tag", "library_name") if k in card}
        config = _json(self.text(repo, "config.json", commit.oid))
        tokenizer = _json(self.text(repo, "tokenizer_config.json", commit.oid))
        if config or tokenizer:
            kept = {k: config[k] for k in ("architectures", "model_type") if k in config}
            facts["config"] = kept | ({"tokenizer_config": tokenizer} if tokenizer else {})
        total: dict[str, int] = {}
        for path, ref in commit.files.items():
            if path.endswith(".safetensors"):
                for dtype, count in safetensors_params(self.blob(ref)):
                    total[dtype] = total.get(dtype, 0) + count
        if total:
            facts["safetensors"] = {"parameters": total, "total": sum(total.values())}
        return facts


def git_blob(content: bytes) -> str:
    """Return git's id for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324


def wants_lfs(path: str, size: int) -> bool:
    """Return whether the Hub would store a file as LFS."""
    return size > LFS_BYTES or Path(path).suffix.lower() in LFS_SUFFIXES


def safetensors_params(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the dtype and element count of each tensor in a safetensors file; nothing for any other file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 64 << 20)))
    except (OSError, ValueError, struct.error):
        return
    for name, entry in header.items():
        if name != "__metadata__":
            count = 1
            for n in entry["shape"]:
                count *= n
            yield entry["dtype"], count


def front_matter(readme: str) -> dict[str, Any]:
    """Return the YAML front matter (the card) of a README."""
    found = re.match(r"\A---\n(.*?)\n---", readme, re.DOTALL)
    try:
        card = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return card if isinstance(card, dict) else {}


def iso(at: float) -> str:
    """Return a time in the Hub's format."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{int(at * 1000) % 1000:03d}Z"


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value))
    part.replace(path)
