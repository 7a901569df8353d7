"""Load Hub datasets from the rows that the parent process downloaded, and adapt calls that expect more rows."""

from __future__ import annotations

import base64
import io
import os
import re
import struct
import wave
import zlib
from types import ModuleType
from typing import Any, Dict, List, Optional

from gpuwarden.remote.first_step.child.record import Record, Stopped

ROWS = 64
_FILES = frozenset(
    [
        "json",
        "csv",
        "parquet",
        "arrow",
        "text",
        "xml",
        "pandas",
        "imagefolder",
        "audiofolder",
        "videofolder",
        "webdataset",
    ]
)


def patch_datasets(record: Record, datasets: ModuleType) -> None:
    """Patch `datasets`: `load_dataset` uses the downloaded rows, and `map` runs in this process."""
    original = datasets.load_dataset

    def load_dataset(path: str, name: Optional[str] = None, *args: Any, **given: Any) -> Any:
        record.at("data")
        if path in _FILES or os.path.exists(path):
            return original(path, name, *args, **{k: v for k, v in given.items() if k != "num_proc"})
        configs = (record.supply("datasets", path) or {}).get("configs")
        if not configs:
            raise record.want("dataset", path)
        if name is None:
            name = next(iter(configs)) if len(configs) == 1 else "default"
        if name not in configs:
            raise ValueError(f"BuilderConfig '{name}' not found in {path}. Available: {sorted(configs)}")
        return _loaded(record, datasets, path, configs[name], given)

    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    datasets.load.load_dataset = load_dataset
    few = "the rows of the dataset viewer"

    def select(self: Any, indices: Any, *args: Any, **given: Any) -> Any:
        wanted = list(indices) if not isinstance(indices, int) else indices
        inside = [i for i in wanted if i < len(self)] if isinstance(wanted, list) else wanted
        if wanted and not inside:
            inside = list(range(len(self)))
        return select_rows(self, inside, *args, **given)

    def split(self: Any, test_size: Any = None, train_size: Any = None, *args: Any, **given: Any) -> Any:
        sizes = [len(self) // 4 if isinstance(s, int) and s >= len(self) // 2 else s for s in (test_size, train_size)]
        return split_rows(self, sizes[0], sizes[1], *args, **given)

    def skip(self: Any, n: int) -> Any:
        return self if n >= len(self) else skip_rows(self, n)

    def in_one_process(self: Any, *args: Any, **given: Any) -> Any:
        given.pop("num_proc", None)
        return mapped(self, *args, **given)

    kind = datasets.Dataset
    select_rows, split_rows, skip_rows, mapped = kind.select, kind.train_test_split, kind.skip, kind.map
    kind.select, kind.train_test_split, kind.skip, kind.map = select, split, skip, in_one_process
    record.order["few"] = few


def _loaded(record: Record, datasets: ModuleType, path: str, config: Dict[str, Any], given: Dict[str, Any]) -> Any:
    splits = config["splits"]
    made_up = any(s.get("made_up") for s in splits.values())
    record.replaced(f"dataset {path}", f"{ROWS} rows from the Hub" if not made_up else "rows created from its columns",
                    made_up=made_up)  # fmt: skip

    def one(name: str) -> Any:
        if name not in splits:
            raise ValueError(f'Unknown split "{name}". Should be one of {sorted(splits)}.')
        rows = splits[name]["rows"]
        types = splits[name].get("features") or {}
        try:
            features = datasets.Features.from_dict(types) if types else None
            rows = [{k: _cell(v, types.get(k)) for k, v in row.items()} for row in rows]
            table = datasets.Dataset.from_list((rows * ROWS)[:ROWS], features=features)
        except Exception as error:  # the Hub's viewer may return types that the installed library does not support
            raise Stopped(f"rows for {path} can't be created here: {type(error).__name__}: {error}") from error
        return table.to_iterable_dataset() if given.get("streaming") else table

    split = given.get("split")
    if split is None:
        kind = datasets.IterableDatasetDict if given.get("streaming") else datasets.DatasetDict
        return kind({name: one(name) for name in splits})
    if isinstance(split, (list, tuple)):
        return [one(_split_name(str(s))) for s in split]
    return one(_split_name(str(split)))


def _split_name(text: str) -> str:
    return re.split(r"[\[+(]", text)[0].strip()


def _cell(value: Any, feature: Any) -> Any:
    kind = feature.get("_type") if isinstance(feature, dict) else None
    if kind == "Image":
        return {"bytes": _picture(), "path": None}
    if kind == "Audio":
        return {"bytes": _sound(), "path": None}
    if isinstance(feature, list) and isinstance(value, list) and feature:
        return [_cell(v, feature[0]) for v in value]
    if kind in {"List", "Sequence", "LargeList"} and isinstance(value, list):
        return [_cell(v, feature.get("feature")) for v in value]
    if kind is None and isinstance(feature, dict) and isinstance(value, dict):
        return {k: _cell(v, feature.get(k)) for k, v in value.items()}
    if kind == "Value" and feature.get("dtype") == "binary" and isinstance(value, str):
        return base64.b64decode(value)
    return value


def _picture(side: int = 64) -> bytes:
    """Return a gray PNG."""
    rows = b"".join(b"\0" + b"\x80" * 3 * side for _ in range(side))
    chunks: List[bytes] = []
    for name, content in (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ):
        chunks.append(struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _sound() -> bytes:
    """Return one second of silence in WAV format."""
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"\0\0" * 16_000)
    return made.getvalue()
