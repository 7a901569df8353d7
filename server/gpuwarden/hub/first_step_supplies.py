"""Fetch models' small files and a few dataset rows from the Hub, to run a script's first step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import anyio
import anyio.to_thread

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, WardenError
from gpuwarden.core.repos import Config
from gpuwarden.core.safe_names import local_name
from gpuwarden.hub import viewer
from gpuwarden.hub.client import HubClient, HubConfig
from gpuwarden.hub.details import read_repo
from gpuwarden.static_analysis.hub_references import RepoUse

MOST_REPOS: Final = 24
MOST_FILES: Final = 60
MOST_BYTES: Final = 64 << 20
MOST_OF_ROWS: Final = 4 << 20
"""Maximum total size of a split's features and rows, in characters of JSON."""
PATIENCE_S: Final = 120.0
"""Time limit in seconds for all downloads together, because a slow server can keep a single download from timing out.
"""
MOST_CONFIGS, MOST_SPLITS, MOST_ROWS = 4, 6, 8
_WANTED: Final = ("*.json", "*.txt", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.yaml")
_UNWANTED: Final = ("*.index.json", "optimizer*", "training_args*", "trainer_state.json", "README*", "*/checkpoint-*")


@dataclass(frozen=True)
class Supplies:
    """Model files, keyed by repo and path, and dataset configs with their splits, features and rows."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)


async def bring(uses: Iterable[RepoUse], config: HubConfig, *, clock: Clock | None = None) -> Supplies:
    """Return the files and rows of these repos from the Hub or its local cache; omit those that can't be fetched."""
    found = Supplies()
    named = list(dict.fromkeys((use.type, use.id) for use in uses))
    async with HubClient(config, clock=clock) as hub:
        with anyio.move_on_after(PATIENCE_S):
            async with anyio.create_task_group() as group:
                for kind, name in named[:MOST_REPOS]:
                    group.start_soon(_model if kind == "model" else _dataset, hub, name, found)
    return found


async def _model(hub: HubClient, name: str, found: Supplies) -> None:
    files: dict[str, bytes] = {}
    try:
        repo = await read_repo(hub, name, "model", most_files=2_000)
        left = MOST_BYTES
        for file in [f for f in repo.files if wanted(f.path)][:MOST_FILES] if repo.readable else ():
            if file.size is not None and file.size <= left:
                path = f"/{repo.id_now or name}/resolve/{repo.sha or 'main'}/{quote(file.path)}"
                content = await _content(hub, path, left)
                if content is not None:
                    files[file.path] = content
                    left -= len(content)
    except WardenError:
        files = {}
    if not files:
        files = await anyio.to_thread.run_sync(_cached, name)
    if files:
        found.models[name] = files


async def _content(hub: HubClient, path: str, most: int) -> bytes | None:
    """Return the content of one file; None if the file can't be fetched or is longer than `most` bytes."""
    content = bytearray()
    async with hub.stream("GET", path) as response:
        if response.status_code != 200:
            return None
        async for block in response.aiter_bytes():
            content += block
            if len(content) > most:
                return None
    return bytes(content)


def _cached(name: str) -> dict[str, bytes]:
    """Return a model's small files from this machine's Hub cache."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the library raises various error types for a missing repo
        return {}
    chosen: dict[str, bytes] = {}
    left = MOST_BYTES
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if len(chosen) < MOST_FILES and wanted(name) and path.is_file() and path.stat().st_size <= left:
            chosen[name] = path.read_bytes()
            left -= len(chosen[name])
    return chosen


def wanted(path: str) -> bool:
    """Return whether a file in a model's repo is a config, part of a tokenizer, or code.

    Return False for a path outside the repo; a Hub mirror may list such paths.
    """
    try:
        if local_name(path) != path:
            return False
    except BadReply:
        return False
    return any(fnmatch(path, p) for p in _WANTED) and not any(fnmatch(path, p) for p in _UNWANTED)


async def _dataset(hub: HubClient, name: str, found: Supplies) -> None:
    try:
        listed = await viewer.structure(hub, name)
        now = name
        if not listed.configs:  # the viewer lists a renamed dataset only under its new name
            now = (await read_repo(hub, name, "dataset", most_files=1)).id_now or name
            listed = await viewer.structure(hub, now) if now != name else listed
        configs = {c.name: {"splits": s} for c in listed.configs[:MOST_CONFIGS] if (s := await _splits(hub, now, c))}
    except WardenError:
        return
    if configs:
        found.datasets[name] = {"configs": configs}


async def _splits(hub: HubClient, name: str, config: Config) -> dict[str, Any]:
    """Return the features and rows of a config, keyed by split; omit splits for which the viewer has no rows."""
    found: dict[str, Any] = {}
    for split in config.splits[:MOST_SPLITS]:
        where = {"dataset": name, "config": config.name, "split": split.name}
        reply = await hub.get("/first-rows", where, viewer=True)
        if reply.status == 200 and isinstance(reply.json, dict) and (rows := _rows(reply.json)):
            found[split.name] = rows
    return found


def _rows(reply: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the features and a few rows from the viewer's response; None if it has no usable row."""
    try:
        features = {str(f["name"]): f["type"] for f in reply["features"]}
        whole = [row["row"] for row in reply["rows"] if not row.get("truncated_cells")] or [
            r["row"] for r in reply["rows"]
        ]
    except (AttributeError, KeyError, TypeError):
        return None
    rows = [row for row in whole[:MOST_ROWS] if isinstance(row, dict)]
    found = {"features": features, "rows": rows}
    return found if rows and len(json.dumps(found)) <= MOST_OF_ROWS else None
