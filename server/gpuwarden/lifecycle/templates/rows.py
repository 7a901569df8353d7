"""Read rows that people have: jsonl, json, csv, tsv and parquet files, COCO annotations, folders of pictures, the Hub.

Rows come one after another, so that a file of any size can be converted; JSON that is one document is read whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.errors import BadReply, BadRequest, DiskError, NotFound, NotSupported
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubClient

Row = dict[str, Any]
SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PICTURES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
ANNOTATIONS: Final = "*annotations*.json"
MAX_WHOLE: Final = 1 << 30
MAX_LINE: Final = 64 << 20
PAGE: Final = 100
LOOK: Final = 50
"""Rows whose values decide the type of a column."""
_CHOOSE: Final = f"Give a file ({', '.join(SUFFIXES)}), a folder of pictures, or the id of a Hub dataset."


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a folder. Raises WardenError that names the place at fault."""
    if not path.exists():
        raise NotFound(f"{path} does not exist", _CHOOSE)
    try:
        if path.is_dir():
            coco = sorted(path.glob(ANNOTATIONS))
            yield from coco_of(coco[0]) if coco else pictures_of(path)
        elif path.suffix == ".jsonl":
            yield from lines_of(path)
        elif path.suffix == ".json":
            yield from document_of(path)
        elif path.suffix in {".csv", ".tsv"}:
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        elif path.suffix == ".parquet":
            yield from parquet_of(path)
        else:
            raise BadRequest(f"{path.name} is not a file of rows", _CHOOSE)
    except OSError as error:
        raise DiskError.of(error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadRequest(f"{path.name} can't be read: {line(error, 120)}", "Save it as UTF-8.") from error


def lines_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a jsonl file."""
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(raw) > MAX_LINE:
                raise BadRequest(f"{path.name}, line {number}, is longer than {MAX_LINE >> 20} MiB", "Split the file.")
            if not raw.strip():
                continue
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"{path.name}, line {number}: {line(error, 120)}", "Correct the line.") from error
            if not isinstance(row, dict):
                raise BadRequest(f"{path.name}, line {number}, is not an object", "Write one JSON object a line.")
            yield row


def document_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a list, of the only list in an object (`{"data": [...]}`), or of COCO annotations."""
    if path.stat().st_size > MAX_WHOLE:
        raise BadRequest(f"{path.name} is larger than {MAX_WHOLE >> 30} GiB", "Save it as jsonl, one row a line.")
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path.name} is not valid JSON: {line(error, 120)}", "Correct it.") from error
    if isinstance(body, dict) and {"images", "annotations", "categories"} <= body.keys():
        yield from _boxes(path, body)
        return
    if isinstance(body, dict):
        lists = [value for value in body.values() if isinstance(value, list)]
        body = lists[0] if len(lists) == 1 else body
    if not isinstance(body, list) or not all(isinstance(row, dict) for row in body):
        raise BadRequest(f"{path.name} is not a list of objects", "Write a JSON list of rows, or one row a line.")
    yield from body


def coco_of(path: Path) -> Iterator[Row]:
    """Yield the pictures of a file of COCO annotations."""
    body = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_WHOLE else None
    if not isinstance(body, dict):
        raise BadRequest(f"{path.name} is not COCO annotations", "Look at the file.")
    yield from _boxes(path, body)


def _boxes(path: Path, body: Row) -> Iterator[Row]:
    """Yield one row for each picture of COCO annotations, with the names of its categories."""
    try:
        names = {c["id"]: c["name"] for c in body["categories"]}
        found: dict[Any, Row] = {
            i["id"]: {"image": i["file_name"], "objects": {"bbox": [], "category": []}} for i in body["images"]
        }
        for box in body["annotations"]:
            objects = found[box["image_id"]]["objects"]
            objects["bbox"].append(box["bbox"])
            objects["category"].append(names[box["category_id"]])
    except (KeyError, TypeError) as error:
        raise BadRequest(
            f"{path.name} is not COCO annotations: {line(repr(error), 100)}",
            "images need id and file_name, annotations image_id, category_id and bbox, categories id and name.",
        ) from error
    yield from found.values()


def pictures_of(path: Path) -> Iterator[Row]:
    """Yield the pictures of a folder with one subfolder for each class, as paths below it."""
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURES and not p.name.startswith("."))
    if not found:
        raise BadRequest(f"{path} has neither pictures nor COCO annotations ({ANNOTATIONS})", _CHOOSE)
    for picture in found:
        parts = picture.relative_to(path).parts
        if len(parts) < 2:
            raise BadRequest(f"{picture.name} is in no subfolder", "Make one subfolder of pictures for each class.")
        yield {"image": "/".join(parts), "label": parts[-2]}


def parquet_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise NotSupported("reading parquet needs pyarrow", "Install pyarrow, or save the rows as jsonl.") from error
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1_000):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise BadRequest(f"{path.name} can't be read: {line(error, 120)}", "Look at the file.") from error


async def hub_rows(hub: HubClient, dataset: str, config: str, split: str, most: int) -> AsyncIterator[Row]:
    """Yield the first rows of a Hub dataset, as the viewer has them."""
    offset = 0
    while offset < most:
        where = {"dataset": dataset, "config": config, "split": split, "offset": offset}
        reply = await hub.get("/rows", {**where, "length": min(PAGE, most - offset)}, viewer=True)
        items = reply.json.get("rows") if reply.status == 200 and isinstance(reply.json, dict) else None
        if not isinstance(items, list):
            raise BadReply(f"rows of {dataset} could not be read: {reply.said}", "Download it and give the file.")
        for item in items:
            if item.get("truncated_cells"):
                raise NotSupported(f"{dataset} has rows too long for the viewer", "Download it and give the file.")
            yield item["row"]
        offset += len(items)
        if len(items) < PAGE:
            return


def types_of(rows: Iterator[Row]) -> dict[str, str]:
    """Return the columns of the first rows with their types, in the short form of the viewer."""
    found: dict[str, str] = {}
    for row in islice(rows, LOOK):
        for name, value in row.items():
            if found.get(str(name), "null") == "null":
                found[str(name)] = type_of(value)
    return found


def type_of(value: Any, depth: int = 0) -> str:
    """Return the type of a value, such as `list<{role: string, content: string}>`."""
    if depth > 6:
        return "..."
    if isinstance(value, dict):
        return f"{{{', '.join(f'{line(k, 60)}: {type_of(v, depth + 1)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"list<{type_of(value[0], depth + 1) if value else 'null'}>"
    kinds = {bool: "bool", int: "int64", float: "float64", type(None): "null", str: "string"}
    return kinds.get(type(value), "unknown")
