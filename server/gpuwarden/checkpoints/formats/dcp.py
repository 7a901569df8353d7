"""Read torch.distributed.checkpoint files: `.metadata`, a pickle that maps tensors to files, and `.distcp` files.

Each record in a `.distcp` file is an archive written by torch.save, so it has CRCs, which `dcp.load` does not check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, Span, short
from gpuwarden.checkpoints.formats import torch_zip
from gpuwarden.checkpoints.pickles import allow_list, symbolic, torch_objects
from gpuwarden.checkpoints.pickles.nodes import Call
from gpuwarden.checkpoints.safe_file import Source, Window

NAME = "dcp"
LOAD = "tensors"


@dataclass(frozen=True)
class Record:
    """One record: the tensor's name, the file that contains its bytes, and the byte range in that file."""

    name: str
    file: str
    offset: int
    length: int

    @classmethod
    def of(cls, key: Any, value: Any) -> Record:
        """Return the record that one entry of `storage_data` describes. Raises Broken if the entry is invalid."""
        index = key.state if isinstance(key, Call) else None
        info = value.state if isinstance(value, Call) else None
        if isinstance(index, dict) and isinstance(info, dict):
            name, file, at, length = (index.get("fqn"), *(info.get(k) for k in ("relative_path", "offset", "length")))
            named = isinstance(name, str) and isinstance(file, str) and Path(file).name == file
            if named and all(type(n) is int and 0 <= n < 1 << 60 for n in (at, length)):
                return cls(str(name), str(file), int(at or 0), int(length or 0))
        raise Broken("its metadata has an entry that is invalid or refers to a file outside the folder")


def claims(name: str, head: bytes) -> bool:
    """Return true for this format's file names."""
    return name == ".metadata" or name.endswith(".distcp")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the metadata, or every record in a `.distcp` file."""
    if source.path.name == ".metadata":
        return _metadata(source, limits)
    listing = source.beside(".metadata")
    if listing is None:
        raise Broken("has no .metadata in its folder: the save was never finished, so the file can't be loaded")
    with listing:
        rows = [r for r in _metadata(listing, limits).content if r.file == source.path.name]
    found = Anatomy(NAME)
    at = 0
    for row in sorted(rows, key=lambda r: r.offset):
        if row.offset != at or row.offset + row.length > source.size:
            what = (
                "overlaps another record or follows a gap"
                if row.offset != at
                else f"needs bytes up to {row.offset + row.length:,}"
            )
            raise Broken(f"has {source.size:,} bytes; record {short(row.name, 60)} {what}")
        at = row.offset + row.length
        window = Window(source, row.offset, row.length)
        if not any(window.head(16)):
            raise Broken(f"record {short(row.name, 60)} begins with zeros: it was never written")
        if window.head(2) != b"PK":
            raise Doubtful(f"record {short(row.name, 60)} is not an archive written by torch.save")
        part = torch_zip.read(window, limits)
        found.later += part.later
        if type(part.content) is int:
            found.meta[row.name] = part.content
        for t in part.tensors:
            name = f"{row.name}.{t.name}" if t.name else row.name
            found.tensors.append(replace(t, name=name, start=t.start + row.offset))
        for s in part.spans:
            found.spans.append(Span(f"{row.name}/{s.label}", s.start + row.offset, s.end + row.offset, s.crc))
        found.problems += part.problems
        found.doubts += part.doubts
    if not rows:
        raise Doubtful("is not listed in .metadata")
    if at != source.size:
        raise Broken(f"{source.size - at:,} bytes follow its last record")
    found.proved.append(f"{len(rows):,} records fill the file, as .metadata specifies")
    return found


def _metadata(source: Source, limits: Limits) -> Anatomy:
    found = Anatomy("dcp metadata")
    tree = symbolic.Machine(source.at(0, min(source.size, limits.pickle)), limits, names=allow_list.DCP_METADATA).run()
    if tree.end != source.size:
        raise Broken("bytes follow the end of its pickle")
    torch_objects.judge(found, tree, allow_list.DCP_METADATA)
    state = tree.root.state if isinstance(tree.root, Call) else None
    storage = state.get("storage_data") if isinstance(state, dict) else None
    if not isinstance(storage, dict):
        raise Broken("its pickle has no storage_data")
    found.content = [Record.of(key, value) for key, value in storage.items()]
    found.proved.append(f"lists {len(found.content):,} records in {len({r.file for r in found.content}):,} files")
    return found
