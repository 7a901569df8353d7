"""Find tensors that are well-formed but suspicious: all zero, constant, or copies of each other.

Such tensors cause only warnings, because biases and adapters start at zero, norms start at one, and tied weights are
copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Tensor, short, some
from gpuwarden.checkpoints.safe_file import Source

# File extensions of weight files, including those of unsupported formats.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".npz", ".npy", ".distcp", ".msgpack", ".onnx",
    ".h5", ".hdf5", ".keras", ".pb", ".tflite", ".pkl", ".pickle", ".joblib", ".model", ".params", ".weights", ".zarr",
    ".pdparams", ".mar", ".engine", ".plan", ".nemo", ".index", ".flax", ".mlmodel", ".tar", ".tgz", ".gz", ".zst",
    ".xz", ".bz2", ".7z", ".zip",
)  # fmt: skip
_RESULTS = (".png", ".apng", ".jpg", ".jpeg", ".svg", ".csv", ".tsv", ".log", ".out", ".err")
_MAGIC = (
    b"PK", b"\x80", b"GGUF", b"\x93NUMPY", b"\x89HDF", b"\x1f\x8b", b"(\xb5/\xfd", b"\xfd7zXZ", b"BZh", b"7z\xbc\xaf",
)  # fmt: skip
_READ_HERE = (b"PK", b"\x80", b"GGUF", b"\x93NUMPY", b"\x89HDF")
_BULKY = 16 << 20
_LARGE = 1024  # elements; smaller tensors are often equal by chance
_SAMPLE = 256
_PIECE = 1 << 20


def like_weights(path: str, head: bytes, size: int) -> bool:
    """Return true if a file's name, first bytes or size suggest that it may contain weights."""
    name = path.rsplit("/", 1)[-1].lower()
    parts = name.split(".")
    named = name.endswith(_WEIGHTS) or any(f".{p}" in _WEIGHTS for p in parts[1:]) or ".data-" in name
    tensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size  # the beginning of a safetensors file
    return named or tensors or head.startswith(_MAGIC) or size >= _BULKY


def disguised(head: bytes, size: int) -> bool:
    """Return true if a file begins with the signature of a known weight format."""
    tensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size
    return tensors or head.startswith(_READ_HERE)


def no_weights(path: str, head: bytes, size: int) -> bool:
    """Return true if a file is named like an image, table or log, and its bytes and size do not suggest weights."""
    return path.lower().endswith(_RESULTS) and not like_weights(path, head, size)


def suspicions(source: Source, anatomy: Anatomy, zero: Iterable[Tensor]) -> list[str]:
    """Return warnings about the large matrices in a file. `zero` lists the tensors that contain only zeros."""
    blank = {id(t) for t in zero}
    dense = [t for t in anatomy.tensors if t.start >= 0 and t.stride is None and t.dtype in DTYPES]
    large = [t for t in dense if t.numel >= _LARGE and len(t.shape) > 1]
    flat = [t for t in large if id(t) not in blank and _constant(source, t)]
    still = blank | {id(t) for t in flat}
    lines = (
        ("all zero", [t.name for t in large if id(t) in blank]),
        ("every value the same", [t.name for t in flat]),
        ("copies of each other", _copies(source, [t for t in large if id(t) not in still])),
    )
    return [f"{what}: {some(short(n, 80) for n in names)}" for what, names in lines if names]


def _constant(source: Source, t: Tensor) -> bool:
    """Return true if all elements are equal. Only a sample is read if the first elements differ."""
    size = max(DTYPES[t.dtype].bits // 8, 1)
    first = source.at(t.start, size)
    if source.at(t.start, _SAMPLE // size * size) != first * (_SAMPLE // size):
        return False
    whole = first * (_PIECE // size)
    ends = range(0, t.extent, len(whole))
    return all(source.at(t.start + at, n) == whole[:n] for at in ends if (n := min(len(whole), t.extent - at)))


def _copies(source: Source, tensors: list[Tensor]) -> list[str]:
    """Return pairs of tensors that have equal bytes at different offsets.

    Tensors at the same offset are tied weights, not copies.
    """
    known: dict[tuple[object, ...], Tensor] = {}
    found = []
    for t in tensors:
        middle = t.start + t.extent // 2
        marks = (source.at(t.start, 64), source.at(middle, 64), source.at(t.start + t.extent - 64, 64))
        other = known.setdefault((t.dtype, t.shape, *marks), t)
        pieces = range(0, t.extent, _PIECE)
        if other.start != t.start and all(
            source.at(other.start + at, n) == source.at(t.start + at, n)
            for at in pieces
            if (n := min(_PIECE, t.extent - at))
        ):
            found.append(f"{short(other.name, 80)} and {short(t.name, 80)}")
    return found
