"""Load files in a child process: read the task as JSON on stdin, print one JSON line per file on stdout."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Limits
from gpuwarden.checkpoints.safe_file import Source


def main() -> None:
    """Load every file of the task; continue with the next one whatever a file causes."""
    task = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr
    _limit(int(task["memory"]))
    for file in task["files"]:
        try:
            answer = _load(Path(file["path"]), str(file["name"]), str(file["format"]))
        except MemoryError:
            answer = {"memory": True}
        except ImportError as why:
            answer = {"missing": str(why.name)}
        except Exception as why:
            text = f"{type(why).__name__}: {why}"
            answer = {"memory": True} if "allocate memory" in text else {"error": " ".join(text.split())[:300]}
        print(json.dumps(answer), file=out, flush=True)


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limit; the time limit still applies
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(path: Path, name: str, form: str) -> dict[str, Any]:
    if form == "numpy":
        return _numpy(path) if _has("numpy") else _own(path, name)
    torch = _torch()
    if torch is None or (form == "safetensors" and not _has("safetensors")):
        return _own(path, name)
    if form == "safetensors":
        from safetensors.torch import load_file

        return _count("safetensors", load_file(path))
    if form in ("torch zip", "torch legacy"):
        with torch.serialization.safe_globals(_numpy_globals()):
            return _count("torch", torch.load(path, map_location="cpu", weights_only=True))
    return _own(path, name)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _torch() -> Any:
    """Return torch where its safe loader is safe, else None: before 2.6 a file could make it run code."""
    try:
        import torch
    except ImportError:
        return None
    version = tuple(int(p) for p in torch.__version__.split(".")[:2] if p.isdecimal())
    return torch if version >= (2, 6) else None


def _numpy_globals() -> list[Any]:
    """Return the types of random number states; transformers allows the same when it resumes."""
    if not _has("numpy"):
        return []
    import numpy as np

    core = np._core if hasattr(np, "_core") else np.core  # noqa: SLF001
    kinds = [type(np.dtype(c)) for c in ("u4", "u8", "i4", "i8", "f4", "f8", "?", "u1")]
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *kinds]  # noqa: SLF001


def _count(by: str, value: Any) -> dict[str, Any]:
    """Return the numbers of tensors and of elements below a loaded value, each container counted once."""
    import torch

    tensors = elements = 0
    stack, seen = [value], set()
    while stack:
        one = stack.pop()
        if isinstance(one, torch.Tensor):
            tensors, elements = tensors + 1, elements + one.numel()
        elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            stack += one.values() if isinstance(one, dict) else one
    return {"by": by, "tensors": tensors, "elements": elements}


def _numpy(path: Path) -> dict[str, Any]:
    """Load with numpy, which refuses objects here."""
    import numpy as np

    loaded = np.load(path, allow_pickle=False)
    sizes = [loaded.size] if isinstance(loaded, np.ndarray) else [loaded[name].size for name in loaded.files]
    return {"by": "numpy", "tensors": len(sizes), "elements": sum(sizes)}


def _own(path: Path, name: str) -> dict[str, Any]:
    """Read every tensor into a numpy array of its shape; types that numpy lacks become integers of their width.

    Without numpy, they are read into plain memory.
    """
    with Source(path, name) as source:
        plugin = reader(name, source.head())
        assert plugin is not None
        anatomy: Anatomy = plugin.read(source, Limits())
        one, by = (_array, "numpy") if _has("numpy") else (_plain, "memory, without numpy")
        elements = sum(one(source, anatomy, i) for i in range(len(anatomy.tensors)))
    return {"by": f"our own reader into {by}", "tensors": len(anatomy.tensors), "elements": elements}


def _plain(source: Source, anatomy: Anatomy, i: int) -> int:
    """Read a tensor's bytes; return the number of elements."""
    t = anatomy.tensors[i]
    if t.start < 0:
        return t.numel
    data = source.at(t.start, t.extent)
    bits = DTYPES[t.dtype].bits if t.dtype in DTYPES else 0
    return t.numel if not bits or bits % 8 or t.stride else len(data) * 8 // bits


def _array(source: Source, anatomy: Anatomy, i: int) -> int:
    import numpy as np

    t = anatomy.tensors[i]
    if t.start < 0:
        return t.numel
    data = source.at(t.start, t.extent)
    bits = DTYPES[t.dtype].bits if t.dtype in DTYPES else 0
    if not bits or bits % 8:
        return t.numel
    each = bits // 8
    raw = np.frombuffer(data, np.uint8)
    strides = tuple(s * each for s in t.stride) if t.stride else None
    if strides is None:
        return int(raw.reshape(*t.shape, each).size // each)
    view = np.lib.stride_tricks.as_strided(raw, (*t.shape, each), (*strides, 1), writeable=False)
    return int(np.ascontiguousarray(view).size // each)


if __name__ == "__main__":
    main()
