"""Read rows from jsonl, json, csv, tsv and parquet files, COCO annotations, image folders, and the Hub.

Rows are yielded one by one, so that a file of any size can be converted.
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
from gpuwarden.lifecycle.templates.json_rows import MAX_LINE, Row, coco_of, document_of

SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
PICTURES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
ANNOTATIONS: Final = "*annotations*.json"
EXTRA: Final = "(cells beyond the header)"
"""Name of the column for the extra cells of a csv row, which have no header."""
MAX_BATCH: Final = 128 << 20
"""Maximum size in bytes of the parquet values decoded at a time."""
MAX_RATIO: Final = 100
"""Maximum ratio of uncompressed to compressed size.

Text has a ratio of about 10. A ratio above 100 means that a column repeats a few values.
"""
PAGE: Final = 100
LOOK: Final = 50
"""Number of rows whose values determine the column types."""
_CHOOSE: Final = f"Specify a file ({', '.join(SUFFIXES)}), a folder of images, or the id of a Hub dataset."


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file or a folder. Raises a WardenError that names the invalid file or line."""
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
            csv.field_size_limit(MAX_LINE)
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file, restkey=EXTRA, delimiter="\t" if path.suffix == ".tsv" else ",")
        elif path.suffix == ".parquet":
            yield from parquet_of(path)
        else:
            raise BadRequest(f"{path.name} is not in a supported file format", _CHOOSE)
    except OSError as error:
        raise DiskError.of(error) from error
    except csv.Error as error:
        fix = "Check its quotes, or save the rows as jsonl."
        raise BadRequest(f"{path.name} can't be read: {line(error, 120)}", fix) from error
    except UnicodeDecodeError as error:
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
                raise BadRequest(f"{path.name}, line {number}, is not an object", "Write one JSON object per line.")
            yield row


def pictures_of(path: Path) -> Iterator[Row]:
    """Yield the images in a folder that has one subfolder for each class, as paths relative to the folder."""
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in PICTURES and not p.name.startswith("."))
    if not found:
        raise BadRequest(f"{path} has neither images nor COCO annotations ({ANNOTATIONS})", _CHOOSE)
    for picture in found:
        parts = picture.relative_to(path).parts
        if len(parts) < 2:
            raise BadRequest(f"{picture.name} is not in a subfolder", "Create one subfolder of images for each class.")
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
            for number in range(file.num_row_groups):
                size = _batch_size(path, file.metadata.row_group(number))
                for batch in file.iter_batches(batch_size=size, row_groups=[number]):
                    yield from batch.to_pylist()
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise BadRequest(f"{path.name} can't be read: {line(error, 120)}", "Check the file.") from error


def _batch_size(path: Path, group: Any) -> int:
    """Return the number of rows to decode at a time, so that a batch stays below `MAX_BATCH` bytes.

    Raises BadRequest for a row group that repeats a few values so often that its rows would not fit into memory.
    """
    whole = 0
    for column in (group.column(n) for n in range(group.num_columns)):
        nested = column.num_values > group.num_rows
        decoded = max(column.total_uncompressed_size, 8 * column.num_values if nested else 0)
        if decoded > MAX_BATCH and decoded > MAX_RATIO * column.total_compressed_size:
            raise BadRequest(
                f"{path.name}: column {line(column.path_in_schema, 60)} expands to over {MAX_RATIO} times its size",
                "Check the file; if its rows are correct, save them as jsonl.",
            )
        whole += decoded
    # Up to four copies of a row are in memory: one decoded in advance, one read, and two while Python creates the
    # values.
    return max(1, min(1_000, MAX_BATCH // (4 * max(1, whole))))


async def hub_rows(hub: HubClient, dataset: str, config: str, split: str, most: int) -> AsyncIterator[Row]:
    """Yield the first rows of a Hub dataset from the dataset viewer."""
    offset = 0
    while offset < most:
        where = {"dataset": dataset, "config": config, "split": split, "offset": offset}
        reply = await hub.get("/rows", {**where, "length": min(PAGE, most - offset)}, viewer=True)
        items = reply.json.get("rows") if reply.status == 200 and isinstance(reply.json, dict) else None
        if not isinstance(items, list):
            raise BadReply(
                f"rows of {dataset} could not be read: {reply.message}", "Download the dataset and pass the file."
            )
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("row"), dict):
                raise BadReply(f"rows of {dataset} have an unknown format", "Download the dataset and pass the file.")
            if item.get("truncated_cells"):
                raise NotSupported(
                    f"{dataset} has rows that are too long for the viewer", "Download the dataset and pass the file."
                )
            yield item["row"]
        offset += len(items)
        if len(items) < PAGE:
            return


def types_of(rows: Iterator[Row]) -> dict[str, str]:
    """Return the columns of the first rows with their types, in the dataset viewer's short notation."""
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
