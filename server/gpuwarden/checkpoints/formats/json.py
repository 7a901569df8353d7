"""Read JSON files: configs, tokenizers, indexes, trainer states, manifests."""

from __future__ import annotations

import json
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, short
from gpuwarden.checkpoints.safe_file import Source

NAME = "json"
LOAD = "parsed"
_NAMES = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", ".zattrs", ".zgroup")


def claims(name: str, head: bytes) -> bool:
    """Return true for JSON file names. orbax's and zarr's JSON files have no extension."""
    return name.endswith((".json", ".ipynb")) or name in _NAMES or (name.startswith("process_") and head[:1] == b"{")


def read(source: Source, limits: Limits) -> Anatomy:
    """Parse the file, with limits on its size and depth, and keep the value for the layout checks."""
    if source.size > limits.json:
        raise Doubtful(f"has {source.size:,} bytes; JSON files above {limits.json:,} bytes are not parsed")
    found = Anatomy(NAME)
    data = source.at(0, source.size)
    if not modest(data, limits):
        raise Doubtful(f"has more than {limits.containers:,} lists and objects; the file is not parsed")
    found.content = parse(data, found)
    found.proved.append("parses as JSON")
    return found


def modest(data: bytes, limits: Limits) -> bool:
    """Return true if the data has so few lists and objects that parsing it can't exhaust the memory."""
    return data.count(b"[") + data.count(b"{") <= limits.containers


def parse(data: bytes, found: Anatomy) -> Any:
    """Return the parsed value. Raises Broken for invalid JSON; NaN and infinity only cause a warning."""
    odd: list[str] = []

    def constant(name: str) -> float:
        odd.append(name)
        return float(name)

    try:
        value = json.loads(data.decode("utf-8-sig"), parse_constant=constant)
    except RecursionError as why:
        raise Broken("is nested too deeply") from why
    except ValueError as why:
        raise Broken(f"is not valid JSON: {short(why, 80)}") from why
    if odd:
        found.warnings.append(
            f"contains {len(odd):,} values that are {' or '.join(sorted(set(odd)))}, which is not valid JSON"
        )
    return value
