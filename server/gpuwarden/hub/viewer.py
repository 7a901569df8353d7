"""Read configs, splits, columns and a preview of some rows from the dataset viewer.

One request to `/info` returns the structure of a dataset whose conversion succeeded. If the conversion failed,
`/splits` still lists the configs, and the rows contain the column names. Missing facts are reported as unknown, with
the reason.
"""

from __future__ import annotations

import json
from typing import Any

from gpuwarden.core.errors import WardenError
from gpuwarden.core.repos import Column, Config, Split, Structure
from gpuwarden.core.sanitize import clip, fence, line
from gpuwarden.hub.client import HubClient, HubResponse

MAX_CONFIGS = 12
MAX_COLUMNS = 40
CELL = 400
PREVIEW = 8_000


async def structure(hub: HubClient, dataset: str, only: str | None = None) -> Structure:
    """Return a dataset's structure, for config `only` or for all configs. Never raises for viewer errors."""
    try:
        params = {"dataset": dataset} | ({"config": only} if only else {})
        info = await hub.get("/info", params, viewer=True)
        if info.status == 200 and (found := _from_info(info.json, only)) is not None:
            return found
        return await _from_splits(hub, dataset, only, info)
    except WardenError as error:
        return Structure(known=False, reached=False, why=error.message)


async def preview(
    hub: HubClient, dataset: str, config: str | None, split: str | None, offset: int, limit: int
) -> tuple[str, Config | None]:
    """Return some rows as fenced JSON lines, and the config with the columns of those rows."""
    if config is None or split is None:
        listed = await hub.get("/splits", {"dataset": dataset}, viewer=True)
        pairs = [(str(s.get("config")), str(s.get("split"))) for s in _dicts((listed.json or {}).get("splits"))]
        inside = [p for p in pairs if config in (None, p[0]) and split in (None, p[1])]
        fitting = inside or [(config or "default", split or "train")]
        config, split = min(fitting, key=lambda p: (p[0] != "default", p[1] != "train"))
    where = {"dataset": dataset, "config": config, "split": split}
    reply = await hub.get("/rows", {**where, "offset": offset, "length": limit}, viewer=True)
    if reply.status != 200 and offset == 0:
        reply = await hub.get("/first-rows", where, viewer=True)
    if reply.status != 200 or not isinstance(reply.json, dict):
        return f"no rows: the dataset viewer returned an error: {reply.message}", None
    rows = []
    for item in _dicts(reply.json.get("rows"))[:limit]:
        cells: dict[str, Any] = {}
        for name, value in list(_dict(item.get("row")).items())[:MAX_COLUMNS]:
            if not isinstance(value, int | float | str | None):
                value = json.dumps(value, ensure_ascii=False)
            cells[line(name, 80)] = line(value, CELL) if isinstance(value, str) else value
        rows.append(json.dumps({"row": item.get("row_idx"), **cells}, ensure_ascii=False))
    total = reply.json.get("num_rows_total")
    what = f"rows {offset}-{offset + len(rows) - 1} of {total if isinstance(total, int) else 'unknown'}"
    text = "\n".join(rows) if rows else "(no rows here)"
    return fence(text, f"{dataset} {config}/{split} {what}", limit=PREVIEW, keep="start"), _from_rows(
        config, split, reply
    )


def _from_info(answer: Any, only: str | None) -> Structure | None:
    if not isinstance(answer, dict) or not isinstance(answer.get("dataset_info"), dict):
        return None
    infos = {only: answer["dataset_info"]} if only else answer["dataset_info"]
    configs = []
    for name, info in infos.items():
        if isinstance(info, dict):
            features, splits = info.get("features"), _dict(info.get("splits"))
            counts = [(line(n), s.get("num_examples") if isinstance(s, dict) else None) for n, s in splits.items()]
            config = Config(
                name=line(name),
                splits=tuple(Split(name=n, rows=rows if isinstance(rows, int) else None) for n, rows in counts),
                columns=_columns(features),
                why="" if isinstance(features, dict) else "the viewer lists no columns",
            )
            configs.append(config)
    if not configs:
        return None
    return Structure(
        configs=tuple(configs[:MAX_CONFIGS]),
        more_configs=max(0, len(configs) - MAX_CONFIGS),
        partial=answer.get("partial") is True,
        failed=_failed(answer),
        why="some configs are still being converted" if answer.get("pending") else "",
    )


async def _from_splits(hub: HubClient, dataset: str, only: str | None, info: HubResponse) -> Structure:
    reply = await hub.get("/splits", {"dataset": dataset}, viewer=True)
    if reply.status != 200 or not isinstance(reply.json, dict):
        return Structure(known=False, why=f"the dataset viewer returned an error: {reply.message}")
    splits: dict[str, list[Split]] = {}
    for item in _dicts(reply.json.get("splits")):
        splits.setdefault(line(item.get("config")), []).append(Split(name=line(item.get("split"))))
    names = [n for n in splits if only in (None, n)]
    configs = [Config(name=n, splits=tuple(splits[n]), why=info.message) for n in names[:MAX_CONFIGS]]
    if configs:
        # Rows, which contain the column names, are often available even if the conversion is pending or has failed.
        first, split = configs[0], configs[0].splits[0].name
        where = {"dataset": dataset, "config": first.name, "split": split}
        rows = await hub.get("/first-rows", where, viewer=True)
        if rows.status == 200 and (seen := _from_rows(first.name, split, rows)):
            configs[0] = first.model_copy(update={"columns": seen.columns, "why": ""})
    return Structure(
        known=bool(configs),
        configs=tuple(configs),
        more_configs=max(0, len(names) - MAX_CONFIGS),
        partial=True,
        failed=_failed(reply.json),
        why=f"the dataset has not been fully converted: {info.message}",
    )


def _columns(features: Any) -> tuple[Column, ...]:
    if not isinstance(features, dict):
        return ()
    named = list(features.items())[:MAX_COLUMNS]
    return tuple(Column(name=line(name, 80), type=clip(short_type(kind), 160, keep="start")) for name, kind in named)


def _from_rows(config: str, split: str, reply: HubResponse) -> Config | None:
    listed = _dicts(reply.json.get("features")) if isinstance(reply.json, dict) else []
    columns = _columns({str(f.get("name")): f.get("type") for f in listed})
    return Config(name=config, splits=(Split(name=split),), columns=columns) if columns else None


def _failed(answer: dict[str, Any]) -> tuple[str, ...]:
    names = (line(f.get("config") or f.get("kind") or "?") for f in _dicts(answer.get("failed")))
    return tuple(dict.fromkeys(names))[:MAX_CONFIGS]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def short_type(feature: Any, depth: int = 0) -> str:
    """Return the type of a `datasets` feature as a short string."""
    if depth > 6:
        return "..."
    if isinstance(feature, list):
        return f"list<{short_type(feature[0] if feature else None, depth + 1)}>"
    if not isinstance(feature, dict):
        return "unknown"
    kind, inside = feature.get("_type"), feature.get("feature")
    if kind == "Sequence" and isinstance(inside, dict) and "_type" not in inside:  # each row contains a dict of lists
        return short_type({name: {"_type": "List", "feature": value} for name, value in inside.items()}, depth)
    if kind in {"Sequence", "List", "LargeList"}:
        return f"list<{short_type(inside, depth + 1)}>"
    if kind == "ClassLabel":
        return f"class<{len(feature.get('names') or ())}>"
    if kind == "Value":
        return line(feature.get("dtype"), 40)
    if isinstance(kind, str):
        return line(kind.lower(), 40)
    inner = ", ".join(f"{line(k, 60)}: {short_type(v, depth + 1)}" for k, v in list(feature.items())[:MAX_COLUMNS])
    return f"{{{inner}}}"
