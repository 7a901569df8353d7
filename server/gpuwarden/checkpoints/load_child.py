"""Load files in a child process: read the task as JSON from stdin, and print one JSON line per file to stdout."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Limits
from gpuwarden.checkpoints.safe_file import Source

_LACKS = ("allocate memory", "can't start new thread")
"""Parts of the error messages that libraries raise when the process reaches a limit."""


def main() -> None:
    """Load every file in the task. An error in one file does not prevent the other files from being loaded."""
    task = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    limit_memory(int(task["memory"]))
    for file in task["files"]:
        try:
            answer = load_one(Path(file["path"]), str(file["name"]), str(file["format"]))
        except MemoryError:
            answer = {"memory": True}
        except ImportError as why:
            answer = {"missing": str(why.name)}
        except (NotImplementedError, AttributeError, TypeError, KeyError) as why:
            # The library does not support a data type or a format, so the file may still be intact.
            answer = {"declined": " ".join(f"{type(why).__name__}: {why}".split())[:300]}
        except Exception as why:
            text = " ".join(f"{type(why).__name__}: {why}".split())[:300]
            if any(lack in text for lack in _LACKS):
                answer = {"memory": True}
            elif isinstance(why, OSError) and why.errno is not None:
                answer = {"unread": text}  # the machine failed or the file changed, so the file may still be intact
            else:
                answer = {"error": text}
        print(json.dumps(answer), file=out, flush=True)


def limit_memory(memory: int) -> None:
    """Limit the address space to `memory` bytes, and disable core dumps."""
    try:
        import resource
    except ImportError:  # on Windows, only the time limit applies
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def load_one(path: Path, name: str, form: str) -> dict[str, Any]:
    """Load a file with the library for its format if it is installed, otherwise with gpuwarden's reader."""
    if form == "numpy" and _has("numpy"):
        import numpy as np

        # Objects are rejected, because unpickling them could run code.
        loaded = np.load(path, allow_pickle=False)
        sizes = [loaded.size] if isinstance(loaded, np.ndarray) else [loaded[name].size for name in loaded.files]
        return {"by": "numpy", "tensors": len(sizes), "elements": sum(sizes)}
    if form == "hdf5" and _has("h5py") and _has("numpy"):
        return _hdf5(path)
    if form not in ("safetensors", "torch zip", "torch legacy"):
        return _own(path, name)
    try:
        import torch
    except ImportError:
        return _own(path, name)
    # Before torch 2.6, a file could make the safe loader run code.
    safe = tuple(int(p) for p in torch.__version__.split(".")[:2] if p.isdecimal()) >= (2, 6)
    if not safe or (form == "safetensors" and not _has("safetensors")):
        return _own(path, name)
    if form == "safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return _count("safetensors", load_file(path))
        except SafetensorError as why:
            if "Dtype not understood" not in str(why):
                raise
            return _own(path, name)  # torch does not support a data type in the file
    random_state: list[Any] = []
    if _has("numpy"):
        import numpy as np

        # The types in saved random number states. transformers allows the same types when it resumes a run.
        core = np._core if hasattr(np, "_core") else np.core  # noqa: SLF001
        random_state = [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype]  # noqa: SLF001
        random_state += [type(np.dtype(c)) for c in ("u4", "u8", "i4", "i8", "f4", "f8", "?", "u1")]
    try:
        with torch.serialization.safe_globals(random_state):
            return _count("torch", torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError:  # the file contains a harmless name that torch's safe loader rejects
        return _own(path, name)


def _hdf5(path: Path) -> dict[str, Any]:
    """Read every dataset with h5py, one block of rows at a time. h5py decompresses chunks."""
    import h5py
    import numpy as np

    sizes: list[int] = []
    strange: list[str] = []

    def read(name: str, one: Any) -> None:
        if not isinstance(one, h5py.Dataset):
            return
        sizes.append(one.size or 0)
        rows = max(1, (64 << 20) // max(one.nbytes // max(len(one), 1), 1)) if one.shape else 1
        for at in range(0, len(one) if one.shape else one.size or 0, rows):
            block = one[at : at + rows] if one.shape else one[()]
            if one.dtype.kind == "f" and not np.isfinite(block).all():
                strange.append(name)
                return

    with h5py.File(path, "r") as file:
        file.visititems(read)
    return {"by": "h5py", "tensors": len(sizes), "elements": sum(sizes), "not_finite": strange[:10]}


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _count(by: str, value: Any) -> dict[str, Any]:
    """Count the tensors and the stored elements in a loaded value. A container that occurs twice is counted once."""
    import torch

    tensors = elements = 0
    keep: list[Any] = []  # keeps the objects alive, so that their ids stay unique
    stack, seen = [value], set()
    while stack:
        one = stack.pop()
        if isinstance(one, torch.Tensor):
            parts = _parts(one)
            again = id(one) in seen
            if parts is not None and not again:
                seen.add(id(one))
                keep.append(one)
            if again and not one.is_quantized:
                continue
            # A quantized tensor is counted each time it occurs, but its scales and zero points only once.
            tensors += 1
            # For 4-bit types, safetensors counts elements, but torch counts bytes, each of which has two elements.
            pairs = 2 if by == "safetensors" and str(one.dtype).endswith("_x2") else 1
            elements += one.numel() * pairs if parts is None else parts[0] if again else sum(parts)
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            stack += one.values() if isinstance(one, dict) else one
    return {"by": by, "tensors": tensors, "elements": elements}


def _parts(tensor: Any) -> list[int] | None:
    """Return the number of elements in each stored part of a composite tensor; None for a plain tensor."""
    import torch

    if tensor.is_meta:
        return [0]
    if tensor.is_quantized:
        packed = tensor.dtype in (torch.quint4x2, torch.quint2x4)
        sizes = [tensor.untyped_storage().nbytes() if packed else tensor.numel()]
        if tensor.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            sizes += [tensor.q_per_channel_scales().numel(), tensor.q_per_channel_zero_points().numel()]
        return sizes
    if tensor.is_nested and tensor.layout is torch.strided:
        about = (tensor._nested_tensor_size(), tensor._nested_tensor_strides(), tensor._nested_tensor_storage_offsets())  # noqa: SLF001
        return [tensor.values().numel(), *(t.numel() for t in about)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().numel(), tensor._values().numel()]  # noqa: SLF001
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.numel() for t in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.numel() for t in (tensor.ccol_indices(), tensor.row_indices(), tensor.values())]
    return None


def _own(path: Path, name: str) -> dict[str, Any]:
    """Read every tensor into a numpy array of its shape. Elements are read as raw bytes, since numpy lacks some types.

    Without numpy, tensors are read into bytes objects. Elements that are compressed or smaller than a byte are only
    counted.
    """
    np = importlib.import_module("numpy") if _has("numpy") else None
    elements = 0
    with Source(path, name) as source:
        plugin = reader(name, source.head())
        assert plugin is not None
        anatomy: Anatomy = plugin.read(source, Limits())
        for t in anatomy.tensors:
            data = source.at(t.start, t.extent) if t.start >= 0 else b""
            each, part = divmod(DTYPES[t.dtype].bits, 8) if t.dtype in DTYPES else (0, 0)
            repeated = t.stride is not None and t.numel * each > len(
                data
            )  # the array could be much larger than the file
            if t.start < 0 or not each or part or repeated:
                elements += t.numel
            elif np is None:
                elements += t.numel if t.stride else len(data) // each
            else:
                shape = (*t.shape, each)
                raw = np.frombuffer(data, np.uint8)
                if t.stride:
                    strides = (*(s * each for s in t.stride), 1)
                    view = np.lib.stride_tricks.as_strided(raw, shape, strides, writeable=False)
                    elements += int(np.ascontiguousarray(view).size // each)
                else:
                    elements += int(raw.reshape(shape).size // each)
    by = "memory, without numpy" if np is None else "numpy"
    return {"by": f"gpuwarden's own reader into {by}", "tensors": len(anatomy.tensors), "elements": elements}


if __name__ == "__main__":
    main()
