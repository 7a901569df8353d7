"""The rehearsal Hub's dataset viewer: the splits, rows and columns of the files in its dataset repos.

A file `data/<split>.jsonl`, `<split>-00000-of-00001.parquet` or `<config>/<split>.csv` belongs to the split and the
config in its path, as in the `datasets` library. Parquet requires pyarrow.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.rehearsal.hub.access import Access, HubError
from gpuwarden.rehearsal.hub.store import HubStore, StoredRepo

PAGE = 100
CELL = 100_000
_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".parquet"})
_SPLIT = re.compile(r"((?:train|test|validation|valid|dev|eval|prompts)(?:_(?:sft|prefs|gen)\b)?)", re.IGNORECASE)
_MISSING = "The dataset does not exist, or is not accessible without authentication (private or gated)."

Table = tuple[dict[str, Any], list[dict[str, Any]]]


class ViewerError(HubError):
    """An error response from the viewer."""


class HubViewer:
    """The viewer's routes for one store."""

    def __init__(self, store: HubStore) -> None:
        self.store = store
        self.access = Access(store)
        self._tables: dict[str, Table] = {}

    def routes(self, base: str) -> list[BaseRoute]:
        """Return the viewer's routes, whose paths start with `base`."""
        names = ("splits", "info", "size", "rows", "first-rows", "is-valid")
        return [Route(f"{base}/{n}", getattr(self, n.replace("-", "_"))) for n in names]

    # --------------------------------------------------------------------------------------------------- answers

    async def splits(self, request: Request) -> Response:
        """GET /splits, a dataset's configs and splits."""
        repo = self._dataset(request)
        keys = [k for k in self._files(repo) if request.query_params.get("config") in (None, k[0])]
        rows = [{"dataset": repo.id, "config": c, "split": s} for c, s in keys]
        return JSONResponse({"splits": rows, "pending": [], "failed": self._failed(repo, keys)})

    async def info(self, request: Request) -> Response:
        """GET /info, the columns and splits of one or all configs."""
        repo = self._dataset(request)
        only = request.query_params.get("config")
        infos: dict[str, Any] = {}
        failed = self._failed(repo, self._files(repo))
        for config, split in self._files(repo):
            if config in {f["config"] for f in failed}:
                continue
            features, rows = self._table(repo, config, split)
            new = {"features": features, "splits": {}, "config_name": config, "builder_name": "json", "license": ""}
            entry = infos.setdefault(config, new)
            entry["splits"][split] = {"name": split, "num_examples": len(rows), "dataset_name": repo.id}
        if failed and not infos:
            raise ViewerError(500, "The dataset generation failed", "UnexpectedError")
        if only is not None and only not in infos:
            raise ViewerError(404, f"The config {only!r} does not exist", "ResponseNotFound")
        jobs = [{"kind": "dataset-info", "dataset": repo.id, "config": f["config"], "split": None} for f in failed]
        answer = infos[only] if only is not None else infos
        return JSONResponse({"dataset_info": answer, "pending": [], "failed": jobs, "partial": False})

    async def size(self, request: Request) -> Response:
        """GET /size, the number of rows and bytes in a dataset."""
        repo = self._dataset(request)
        splits: list[dict[str, Any]] = []
        for config, split in self._files(repo):
            features, rows = self._table(repo, config, split)
            memory = len(json.dumps(rows, default=str))
            sizes = {"num_bytes_parquet_files": memory, "num_bytes_memory": memory, "num_rows": len(rows)}
            counts = sizes | {"num_columns": len(features), "estimated_num_rows": None}
            splits.append({"dataset": repo.id, "config": config, "split": split} | counts)
        total = {k: sum(s[k] for s in splits) for k in ("num_bytes_parquet_files", "num_bytes_memory", "num_rows")}
        whole = {"dataset": repo.id, "estimated_num_rows": None} | total
        configs: list[dict[str, Any]] = []
        for config in dict.fromkeys(s["config"] for s in splits):
            mine = [s for s in splits if s["config"] == config]
            sums = {k: sum(s[k] for s in mine) for k in total}
            other = {"num_columns": mine[0]["num_columns"], "estimated_num_rows": None}
            configs.append({"dataset": repo.id, "config": config} | other | sums)
        size = {"dataset": whole, "configs": configs, "splits": splits}
        return JSONResponse({"size": size, "pending": [], "failed": [], "partial": False})

    async def rows(self, request: Request) -> Response:
        """GET /rows, a range of rows from a split."""
        repo, config, split = self._split(request)
        offset = int(request.query_params.get("offset", "0"))
        length = int(request.query_params.get("length", PAGE))
        if offset < 0 or not 0 <= length <= PAGE:
            raise ViewerError(422, "Parameter 'length' must not be greater than 100", "InvalidParameterError")
        features, rows = self._table(repo, config, split)
        page = list(enumerate(rows))[offset : offset + length]
        counts = {"num_rows_total": len(rows), "num_rows_per_page": PAGE, "partial": False}
        return JSONResponse({"features": _listed(features), "rows": _items(page)} | counts)

    async def first_rows(self, request: Request) -> Response:
        """GET /first-rows, the first page of a split's rows."""
        repo, config, split = self._split(request)
        features, rows = self._table(repo, config, split)
        where = {"dataset": repo.id, "config": config, "split": split}
        page = list(enumerate(rows))[:PAGE]
        return JSONResponse(
            where | {"features": _listed(features), "rows": _items(page), "truncated": len(rows) > PAGE}
        )

    async def is_valid(self, request: Request) -> Response:
        """GET /is-valid, whether the viewer supports a dataset."""
        there = bool(self._files(self._dataset(request)))
        return JSONResponse(dict.fromkeys(("preview", "viewer", "search", "filter", "statistics"), there))

    # ----------------------------------------------------------------------------------------------------- files

    def _dataset(self, request: Request) -> StoredRepo:
        name = request.query_params.get("dataset")
        if not name:
            raise ViewerError(422, "Parameter 'dataset' is required", "MissingRequiredParameter")
        user = self.access.user(request)
        repo = self.store.get("dataset", name)
        inside = repo and not (repo.private or repo.gated)
        if repo and user and (user.may_write(repo.owner) or user.name in repo.grants):
            inside = True
        if repo is None or not inside:
            code = "ExternalAuthenticatedError" if user else "ExternalUnauthenticatedError"
            raise ViewerError(404 if user else 401, _MISSING, code)
        return repo

    def _split(self, request: Request) -> tuple[StoredRepo, str, str]:
        repo = self._dataset(request)
        config, split = request.query_params.get("config"), request.query_params.get("split")
        if not config or not split:
            raise ViewerError(422, "Parameters 'config' and 'split' are required", "MissingRequiredParameter")
        if (config, split) not in self._files(repo):
            raise ViewerError(404, "Not found.", "ResponseNotFound")
        return repo, config, split

    def _files(self, repo: StoredRepo) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for path in sorted(repo.commits[-1].files):
            pure = PurePosixPath(path)
            if pure.suffix in _SUFFIXES and not pure.name.startswith((".", "config", "dataset_infos")):
                folder = pure.parts[0] if len(pure.parts) > 1 and pure.parts[0] != "data" else "default"
                name = _SPLIT.search(pure.stem)
                found.setdefault((folder, name[1].lower() if name else "train"), []).append(path)
        return found

    def _table(self, repo: StoredRepo, config: str, split: str) -> Table:
        paths = self._files(repo)[(config, split)]
        commit = repo.commits[-1]
        key = "|".join(commit.files[p].sha256 for p in paths)
        if key not in self._tables:
            try:
                parts = [_read(p, self.store.blob(commit.files[p]).read_bytes()) for p in paths]
            except (ValueError, KeyError, ImportError) as error:
                raise ViewerError(500, f"The dataset generation failed: {error}", "StreamingRowsError") from None
            self._tables[key] = (parts[0][0], [row for part in parts for row in part[1]])
        return self._tables[key]

    def _failed(self, repo: StoredRepo, keys: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        failed = []
        for config, split in keys:
            try:
                self._table(repo, config, split)
            except ViewerError as error:
                body = {"error": error.message, "cause_exception": "ValueError", "cause_message": error.message}
                failed.append({"dataset": repo.id, "config": config, "error": body | {"cause_traceback": []}})
        return failed


def _read(path: str, content: bytes) -> Table:
    suffix = PurePosixPath(path).suffix
    if suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(io.BytesIO(content))
        declared = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
        known = declared.get("info", {}).get("features", {})
        return {f.name: known.get(f.name) or _arrow(f.type) for f in table.schema}, table.to_pylist()
    if suffix == ".csv":
        rows: Any = list(csv.DictReader(io.StringIO(content.decode())))
    elif suffix == ".jsonl":
        rows = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    else:
        rows = json.loads(content)
    if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
        raise ValueError(f"{path} has no rows")
    names = dict.fromkeys(name for row in rows for name in row)
    return {n: _feature(next((r[n] for r in rows if r.get(n) is not None), None)) for n in names}, rows


def _feature(value: Any) -> Any:
    match value:
        case bool():
            kind = "bool"
        case int():
            kind = "int64"
        case float():
            kind = "float64"
        case list():
            return {"feature": _feature(value[0]), "_type": "List"} if value else {"dtype": "null", "_type": "Value"}
        case {"src": str()}:
            return {"_type": "Image"}  # the viewer represents an image by its address
        case dict():
            return {k: _feature(v) for k, v in value.items()}
        case None:
            kind = "null"
        case _:
            kind = "string"
    return {"dtype": kind, "_type": "Value"}


def _arrow(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"feature": _arrow(kind.value_type), "_type": "List"}
    if pa.types.is_struct(kind):
        return {f.name: _arrow(f.type) for f in kind}
    return {"dtype": {"double": "float64", "float": "float32"}.get(str(kind), str(kind)), "_type": "Value"}


def _listed(features: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"feature_idx": i, "name": n, "type": f} for i, (n, f) in enumerate(features.items())]


def _items(page: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    items = []
    for index, row in page:
        long = [n for n, v in row.items() if len(json.dumps(v, default=str)) > CELL]
        cells = {n: json.dumps(v, default=str)[:CELL] if n in long else v for n, v in row.items()}
        items.append({"row_idx": index, "row": json.loads(json.dumps(cells, default=str)), "truncated_cells": long})
    return items
