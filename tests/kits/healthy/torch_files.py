"""Write tensors of every dtype and layout that torch can save, and common values beside them."""

from __future__ import annotations

import importlib.util
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from healthy import Unreadable, configuration, family

PLAIN = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex128",
    "complex64",
    "complex32",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
SAFE = tuple(n for n in PLAIN if n not in ("complex128", "complex32"))


def torch() -> Any:
    import torch

    torch.manual_seed(0)
    return torch


def tensor(dtype: str) -> Any:
    """Return a tensor of a dtype with ordinary values."""
    t = torch()
    made = getattr(t, dtype)
    if dtype.startswith("complex"):
        return t.complex(t.randn(32, 32), t.randn(32, 32)).to(made)
    if made.is_floating_point and dtype not in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        return t.randn(32, 32).to(made)
    if dtype == "bool":
        return t.rand(32, 32) > 0.5
    if dtype in ("float8_e8m0fnu", "float4_e2m1fn_x2"):
        return t.randint(0, 200, (32, 32), dtype=t.uint8).view(made)
    return t.randint(0, 100, (32, 32)).to(made)


@family("torch zip dtype", PLAIN, "torch")
def zip_dtype(at: Path, dtype: str) -> None:
    torch().save({"weight": tensor(dtype), "bias": tensor(dtype)[0]}, at / "model.pt")


@family("torch legacy dtype", PLAIN, "torch")
def legacy_dtype(at: Path, dtype: str) -> None:
    save_legacy({"weight": tensor(dtype)}, at / "pytorch_model.bin")


def save_legacy(made: Any, path: Path) -> None:
    """Save in the legacy format. Raises Unreadable for values that torch can write in it but can't read back."""
    torch().save(made, path, _use_new_zipfile_serialization=False)
    try:
        torch().load(path, weights_only=True)
    except Exception as why:
        path.unlink()
        raise Unreadable(f"torch can't read it back: {why}") from why


@family("safetensors dtype", SAFE, "torch", "safetensors")
def safe_dtype(at: Path, dtype: str) -> None:
    from safetensors.torch import save_file

    save_file({"weight": tensor(dtype)}, at / "model.safetensors", {"format": "pt"})


def quantized(kind: str) -> Any:
    t = torch()
    if kind == "per channel":
        scales, points = t.rand(8) + 0.1, t.zeros(8, dtype=t.long)
        return t.quantize_per_channel(t.randn(8, 8), scales, points, 0, t.qint8)
    if kind == "per channel float":
        return t.quantize_per_channel(t.randn(8, 8), t.rand(8) + 0.1, t.rand(8), 0, t.quint8)
    return t.quantize_per_tensor(t.randn(8, 8), 0.1, 0, getattr(t, kind))


def layout(kind: str) -> Any:
    t = torch()
    dense = t.randn(16, 16).relu()
    made = {
        "sparse coo": dense.to_sparse,
        "sparse csr": dense.to_sparse_csr,
        "sparse csc": dense.to_sparse_csc,
        "sparse bsr": lambda: dense.to_sparse_bsr((4, 4)),
        "sparse bsc": lambda: dense.to_sparse_bsc((4, 4)),
        "sparse coo hybrid": lambda: t.randn(4, 4, 3).to_sparse(2),
        "nested": lambda: t.nested.nested_tensor([t.randn(3, 4), t.randn(2, 4)]),
        "nested jagged": lambda: t.nested.nested_tensor([t.randn(3, 4), t.randn(2, 4)], layout=t.jagged),
        "transposed": lambda: t.randn(4, 6).t(),
        "view": lambda: t.randn(100)[10:50].view(5, 8),
        "expanded": lambda: t.randn(1, 6).expand(5, 6),
        "strided": lambda: t.randn(10, 10)[::2, ::3],
        "channels last": lambda: t.randn(2, 3, 4, 4).to(memory_format=t.channels_last),
        "conjugate": lambda: t.randn(4, dtype=t.complex64).conj(),
        "negative": lambda: t.randn(4, dtype=t.complex64).conj().imag,
        "empty": lambda: t.empty(0, 7),
        "scalar": lambda: t.tensor(3.5),
        "one": lambda: t.ones(1, 1, 1),
        "gradient": lambda: t.randn(3, requires_grad=True),
        "parameter": lambda: t.nn.Parameter(t.randn(3, 3)),
        "buffer": lambda: t.nn.Buffer(t.randn(3, 3)),
        "large": lambda: t.randn(700, 700),
        "complex view": lambda: t.view_as_complex(t.randn(5, 2)),
    }[kind]
    return made()


LAYOUTS = (
    "sparse coo",
    "sparse csr",
    "sparse csc",
    "sparse bsr",
    "sparse bsc",
    "sparse coo hybrid",
    "nested",
    "nested jagged",
    "transposed",
    "view",
    "expanded",
    "strided",
    "channels last",
    "conjugate",
    "negative",
    "empty",
    "scalar",
    "one",
    "gradient",
    "parameter",
    "buffer",
    "large",
    "complex view",
)


@family("torch zip layout", LAYOUTS, "torch")
def zip_layout(at: Path, kind: str) -> None:
    torch().save({"a": layout(kind), "plain": torch().ones(4)}, at / "model.pth")


# torch reads a nested tensor's sizes from uninitialized memory, so the result varies.
@family("torch legacy layout", [k for k in LAYOUTS if "nested" not in k], "torch")
def legacy_layout(at: Path, kind: str) -> None:
    save_legacy({"a": layout(kind)}, at / "model.pth")


@family("torch quantized", ("qint8", "quint8", "qint32", "per channel", "per channel float"), "torch")
def zip_quantized(at: Path, kind: str) -> None:
    torch().save({"q": quantized(kind), "plain": torch().ones(4)}, at / "model.pt")


def value(kind: str) -> Any:
    import numpy as np

    t = torch()
    rng = np.random.default_rng(0)
    return {
        "tied": lambda: (lambda w: {"embed": w, "head": w})(t.randn(8, 4)),
        "ordered dict": lambda: OrderedDict(a=t.ones(2)),
        "state dict of a module": lambda: t.nn.Sequential(t.nn.Linear(4, 4), t.nn.BatchNorm1d(4)).state_dict(),
        "list of tensors": lambda: [t.ones(3), t.zeros(2)],
        "one tensor": lambda: t.randn(10),
        "nested containers": lambda: {"a": {"b": [t.ones(1), (1, 2.5, None, True, "x")]}, "s": {1, 2}},
        "frozenset, range, slice, complex": lambda: [
            frozenset({1}),
            range(3),
            slice(1, 2),
            1 + 2j,
            b"bytes",
            bytearray(b"x"),
        ],
        "counter, deque, default dict": lambda: {
            "c": Counter("aab"),
            "q": deque([1, 2], maxlen=5),
            "d": defaultdict(list),
        },
        "path": lambda: {"out": Path("runs/a"), "w": t.ones(1)},
        "datetime": lambda: {"at": datetime(2026, 1, 1, tzinfo=UTC), "w": t.ones(1)},
        "numpy array": lambda: {
            "x": rng.normal(size=(4, 4)),
            "i": np.arange(5),
            "f": np.asfortranarray(np.ones((2, 3))),
        },
        "numpy scalars": lambda: {"loss": np.float32(0.5), "n": np.int64(3), "ok": np.bool_(True)},
        "numpy random state": lambda: {"numpy": np.random.get_state(), "w": t.ones(1)},
        "python random state": lambda: {"python": __import__("random").getstate(), "torch": t.get_rng_state()},
        "size, dtype, device": lambda: {"s": t.Size([1, 2]), "d": t.float16, "at": t.device("cpu"), "l": t.strided},
        "attention mask": lambda: {"mask": t.full((8, 8), float("-inf")).triu(1), "w": t.ones(2)},
        "finite mask": lambda: {"mask": t.full((8, 8), t.finfo(t.float32).min).triu(1), "w": t.ones(2)},
        "huge number": lambda: {"n": 10**40, "w": t.ones(2)},
        "unicode names": lambda: {"schicht.ä.重み": t.ones(2)},
        "shared storage": lambda: (lambda b: {"a": b[:5], "b": b[5:]})(t.randn(10)),
        "tensor with attribute": lambda: (lambda p: (setattr(p, "tag", "x"), {"p": p})[1])(t.nn.Parameter(t.ones(2))),
    }[kind]()


VALUES = (
    "tied",
    "ordered dict",
    "state dict of a module",
    "list of tensors",
    "one tensor",
    "nested containers",
    "frozenset, range, slice, complex",
    "counter, deque, default dict",
    "path",
    "datetime",
    "numpy array",
    "numpy scalars",
    "numpy random state",
    "python random state",
    "size, dtype, device",
    "attention mask",
    "finite mask",
    "huge number",
    "unicode names",
    "shared storage",
    "tensor with attribute",
)


@family("torch zip value", VALUES, "torch", "numpy")
def zip_value(at: Path, kind: str) -> None:
    torch().save(value(kind), at / "state.pt")


@family("torch pickle protocol", (3, 4, 5), "torch")
def protocol(at: Path, number: int) -> None:
    made = {"a": torch().ones(100), "d": {i: str(i) for i in range(20)}}
    torch().save(made, at / "model.pt", pickle_protocol=number)


@configuration("torch zip without checksums", "torch")
def no_crc(at: Path) -> None:
    t = torch()
    t.serialization.set_crc32_options(False)
    try:
        t.save({"a": t.randn(100)}, at / "model.pt")
    finally:
        t.serialization.set_crc32_options(True)


@configuration("torch .pth.tar", "torch")
def pth_tar(at: Path) -> None:
    t = torch()
    net = t.nn.Linear(4, 4)
    state = {"epoch": 3, "arch": "resnet18", "state_dict": net.state_dict(), "best_acc1": t.tensor(71.5)}
    t.save(state, at / "model_best.pth.tar")


@configuration("torch alignment of 4096 bytes", "torch")
def aligned(at: Path) -> None:
    t = torch()
    before = t.utils.serialization.config.save.storage_alignment
    t.utils.serialization.config.save.storage_alignment = 4096
    try:
        t.save({"a": t.randn(100), "b": t.randn(3)}, at / "model.pt")
    finally:
        t.utils.serialization.config.save.storage_alignment = before


@configuration("TorchScript", "torch", unknown=("*.pt",))
def scripted(at: Path) -> None:
    t = torch()
    t.jit.save(t.jit.trace(t.nn.Linear(4, 4), t.ones(1, 4)), str(at / "traced.pt"))


@configuration("torch.export", "torch", unknown=("*.pt2",))
def exported(at: Path) -> None:
    t = torch()
    t.export.save(t.export.export(t.nn.Linear(4, 4), (t.ones(1, 4),)), at / "model.pt2")


@configuration("whole pickled module", "torch", unknown=("*.pt",))
def whole_module(at: Path) -> None:
    t = torch()
    t.save(t.nn.Linear(4, 4), at / "model.pt")


@configuration("dataset in a checkpoint", "torch", unknown=("*.pt",))
def dataset(at: Path) -> None:
    t = torch()
    t.save({"data": t.utils.data.TensorDataset(t.ones(3)), "w": t.ones(2)}, at / "data.pt")


if importlib.util.find_spec("pandas") is not None:

    @configuration("data frame in a checkpoint", "torch", "pandas", unknown=("*.pt",))
    def frame(at: Path) -> None:
        import pandas as pd

        torch().save({"log": pd.DataFrame({"loss": [1.0, 0.5]}), "w": torch().ones(2)}, at / "state.pt")
