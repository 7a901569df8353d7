"""Damage one file per format in many ways, and print which verification level detects the damage, as a Markdown table.

    python tools/corruption_matrix.py [--formats NAME...] [--write PAGE]

Each file is written by its format's own library; a format is omitted if its library is missing. Every case is also
verified against a manifest that was created before the damage. `--write` inserts the table into a page between its
markers. The exit code is 1 if verification with a manifest misses any damage, or if an intact file is not proven.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Manifest, Verdict

PAGE = 4096
Arrays = dict[str, Any]
MARKS = ("<!-- generated:corruption -->", "<!-- /generated -->")
MISSED = "."
LEGEND = (
    "**S** refuted at level structure, **C** refuted at level content, **?** unknown at level content: a doubt, "
    f"**{MISSED}** noticed only with a digest that was recorded at save time"
)


# ------------------------------------------------------------------------------------------------------------- formats


def weights(seed: int = 0, width: int = 331) -> Arrays:
    """Return three model matrices whose rows are not aligned with pages."""
    rng = np.random.default_rng(seed)
    return {f"layer{i}.weight": rng.normal(size=(150, width)).astype("f4") for i in range(3)}


def safetensors(folder: Path, seed: int) -> str:
    """Write a safetensors file."""
    from safetensors.numpy import save_file

    save_file(weights(seed), folder / "model.safetensors")
    return "model.safetensors"


def torch_zip(folder: Path, seed: int, *, zipped: bool = True) -> str:
    """Write torch's archive."""
    import torch

    state = {name: torch.from_numpy(array) for name, array in weights(seed).items()}
    torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=zipped)
    return "model.pt"


def torch_legacy(folder: Path, seed: int) -> str:
    """Write a file in torch's legacy format, which is not a zip archive."""
    return torch_zip(folder, seed, zipped=False)


def dcp(folder: Path, seed: int) -> str:
    """Write a torch distributed checkpoint."""
    import torch
    import torch.distributed.checkpoint as library

    state = {name: torch.from_numpy(array) for name, array in weights(seed).items()}
    library.save(state, checkpoint_id=folder, no_dist=True)
    return "__0_0.distcp"


def npz(folder: Path, seed: int) -> str:
    """Write a numpy archive."""
    np.savez(folder / "model.npz", **weights(seed))
    return "model.npz"


def npz_packed(folder: Path, seed: int) -> str:
    """Write a compressed numpy archive."""
    np.savez_compressed(folder / "model.npz", **weights(seed))
    return "model.npz"


def npy(folder: Path, seed: int) -> str:
    """Write one array."""
    np.save(folder / "model.npy", np.concatenate(list(weights(seed).values())))
    return "model.npy"


def gguf(folder: Path, seed: int, kind: str = "F32") -> str:
    """Write a GGUF file."""
    import gguf as library

    writer = library.GGUFWriter(folder / "model.gguf", "llama")
    kept = library.GGMLQuantizationType[kind]
    for name, array in weights(seed, 352).items():
        writer.add_tensor(name, library.quants.quantize(array, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "model.gguf"


def gguf_quantised(folder: Path, seed: int) -> str:
    """Write a quantized GGUF file."""
    return gguf(folder, seed, "Q8_0")


def onnx(folder: Path, seed: int, *, outside: bool = False) -> str:
    """Write an ONNX model."""
    import onnx as library

    tensors = [library.numpy_helper.from_array(array, name) for name, array in weights(seed).items()]
    out = library.helper.make_tensor_value_info("y", library.TensorProto.FLOAT, None)
    node = library.helper.make_node("Identity", ["layer0.weight"], ["y"])
    model = library.helper.make_model(library.helper.make_graph([node], "g", [], [out], initializer=tensors))
    if not outside:
        library.save(model, folder / "model.onnx")
        return "model.onnx"
    library.save_model(model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    return "model.onnx.data"


def onnx_outside(folder: Path, seed: int) -> str:
    """Write an ONNX model with external data."""
    return onnx(folder, seed, outside=True)


def hdf5(folder: Path, seed: int, name: str = "model.h5") -> str:
    """Write an HDF5 file as Keras does."""
    import h5py

    with h5py.File(folder / name, "w") as file:
        for layer, array in weights(seed).items():
            file.create_group(layer)["kernel"] = array
    return name


def keras(folder: Path, seed: int) -> str:
    """Write Keras' archive."""
    hdf5(folder, seed)
    with zipfile.ZipFile(folder / "model.keras", "w") as archive:
        for name in ("metadata.json", "config.json"):
            archive.writestr(name, json.dumps({"class_name": "Sequential"}))
        archive.writestr("model.weights.h5", (folder / "model.h5").read_bytes())
    (folder / "model.h5").unlink()
    return "model.keras"


def msgpack(folder: Path, seed: int) -> str:
    """Write a msgpack file as flax does."""
    import msgpack as library

    def extension(value: Any) -> Any:
        raw = library.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True)
        return library.ExtType(1, raw)

    tree = {"params": weights(seed)}
    (folder / "model.msgpack").write_bytes(library.packb(tree, default=extension))
    return "model.msgpack"


def baselines(folder: Path, seed: int) -> str:
    """Write a Stable-Baselines3 archive."""
    import torch

    state = {name: torch.from_numpy(array) for name, array in weights(seed).items()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(folder / "policy.zip", "w") as archive:
        archive.writestr("data", json.dumps({"gamma": 0.99}))
        archive.writestr("policy.pth", buffer.getvalue())
    return "policy.zip"


def texts(folder: Path, seed: int) -> str:
    """Write a long JSON config."""
    rows = {
        f"key{i}": [int(n) for n in row]
        for i, row in enumerate(np.random.default_rng(seed).integers(0, 999, (300, 30)))
    }
    (folder / "tokenizer.json").write_text(json.dumps(rows, indent=1))
    return "tokenizer.json"


def lines(folder: Path, seed: int) -> str:
    """Write a metrics log."""
    values = np.random.default_rng(seed).random(2000)
    text = "".join(json.dumps({"step": i, "loss": float(value)}) + "\n" for i, value in enumerate(values))
    (folder / "metrics.jsonl").write_text(text)
    return "metrics.jsonl"


FORMATS: dict[str, tuple[Callable[[Path, int], str], str]] = {
    "safetensors": (safetensors, "safetensors"),
    "torch zip": (torch_zip, "torch"),
    "torch legacy": (torch_legacy, "torch"),
    "dcp": (dcp, "torch"),
    "npz": (npz, "numpy"),
    "npz packed": (npz_packed, "numpy"),
    "npy": (npy, "numpy"),
    "gguf": (gguf, "gguf"),
    "gguf q8_0": (gguf_quantised, "gguf"),
    "onnx": (onnx, "onnx"),
    "onnx data": (onnx_outside, "onnx"),
    "hdf5": (hdf5, "h5py"),
    "keras": (keras, "h5py"),
    "msgpack": (msgpack, "msgpack"),
    "sb3 zip": (baselines, "torch"),
    "json": (texts, "numpy"),
    "jsonl": (lines, "numpy"),
}
"""Maps each format's name to (function that writes the file and returns the file's name, required library)."""


# -------------------------------------------------------------------------------------------------------------- damage


@dataclass
class Target:
    """The bytes of an intact file, the range of one tensor in it, and the bytes of another file of the same size."""

    data: bytes
    start: int
    end: int
    other: bytes

    @property
    def middle(self) -> int:
        """Return the offset of an element in the middle of the tensor."""
        return self.start + (self.end - self.start) // 2 // 4 * 4

    @property
    def page(self) -> int:
        """Return the offset of a whole page inside the tensor."""
        return -(-self.middle // PAGE) * PAGE


def put(t: Target, at: int, piece: bytes) -> bytes:
    """Return the data with some bytes replaced; the size is unchanged."""
    return (t.data[:at] + piece + t.data[at + len(piece) :])[: len(t.data)]


def flip(t: Target, at: int, bit: int) -> bytes:
    """Return the data with one bit flipped."""
    return put(t, at, bytes([t.data[at] ^ 1 << bit]))


def swapped(t: Target) -> bytes:
    """Return the data with two pages of the tensor swapped."""
    first, second = t.page, t.page - 4 * PAGE
    return put(t, first, t.data[second : second + PAGE])[:second] + t.data[first : first + PAGE] + put(
        t, first, t.data[second : second + PAGE]
    )[second + PAGE :]  # fmt: skip


NOISE = np.random.default_rng(9).integers(0, 256, PAGE, dtype="u1").tobytes()
DAMAGE: dict[str, Callable[[Target], bytes]] = {
    "empty file": lambda t: b"",
    "Git LFS pointer in its place": lambda t: b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n",
    "an error page in its place": lambda t: b"<!DOCTYPE html><html><body>504 Gateway Time-out</body></html>\n",
    "all bytes zero": lambda t: bytes(len(t.data)),
    "last byte cut": lambda t: t.data[:-1],
    "cut in half": lambda t: t.data[: len(t.data) // 2],
    "cut after the first page": lambda t: t.data[:PAGE],
    "a zero byte appended": lambda t: t.data + b"\0",
    "a page of zeros appended": lambda t: t.data + bytes(PAGE),
    "written twice, one after the other": lambda t: t.data * 2,
    "sent in text mode (LF became CRLF)": lambda t: t.data.replace(b"\n", b"\r\n"),
    "first 16 bytes overwritten": lambda t: put(t, 0, NOISE[:16]),
    "a bit flipped in byte 9": lambda t: flip(t, 9, 4),
    "a bit flipped near the end": lambda t: flip(t, len(t.data) - 5, 4),
    "lowest bit of a value flipped": lambda t: flip(t, t.middle, 0),
    "exponent bit of a value flipped": lambda t: flip(t, t.middle + 3, 5),
    "a value became NaN": lambda t: put(t, t.middle, b"\0\0\xc0\x7f"),
    "a value became infinite": lambda t: put(t, t.middle, b"\0\0\x80\xff"),
    "a value became 1e30": lambda t: put(t, t.middle, np.float32(1e30).tobytes()),
    "a sector of 512 zeros": lambda t: put(t, t.page, bytes(512)),
    "a page of zeros": lambda t: put(t, t.page, bytes(PAGE)),
    "16 kB of zeros": lambda t: put(t, t.page, bytes(4 * PAGE)),
    "zeros from one place to the end": lambda t: put(t, t.middle + 1234, bytes(len(t.data) - t.middle - 1234)),
    "the whole tensor zero": lambda t: put(t, t.start, bytes(t.end - t.start)),
    "a page of 0xFF": lambda t: put(t, t.page, b"\xff" * PAGE),
    "a page of noise": lambda t: put(t, t.page, NOISE),
    "a page repeated": lambda t: put(t, t.page, t.data[t.page - 4 * PAGE : t.page - 3 * PAGE]),
    "two pages swapped": swapped,
    "a page of another model": lambda t: put(t, t.page, t.other[t.page : t.page + PAGE]),
    "a byte lost in the middle": lambda t: t.data[: t.middle] + t.data[t.middle + 1 :],
    "a byte inserted in the middle": lambda t: t.data[: t.middle] + b"\1" + t.data[t.middle :],
    "a page lost in the middle": lambda t: t.data[: t.page] + t.data[t.page + PAGE :],
    "byte order of a tensor swapped": lambda t: put(t, t.start, swap_order(t)),
    "the file of another model": lambda t: t.other,
}
"""Maps each kind of damage to a function that returns the damaged bytes."""


def swap_order(t: Target) -> bytes:
    """Return the tensor's bytes in the other byte order."""
    size = (t.end - t.start) // 4 * 4
    return np.frombuffer(t.data[t.start : t.start + size], "<u4").byteswap().tobytes()


# ------------------------------------------------------------------------------------------------------------ verdicts


def target(path: Path, other: bytes) -> Target:
    """Return an intact file with the range of a tensor, or the file's middle half if no tensor is uncompressed."""
    data = path.read_bytes()
    with Source(path) as source:
        plugin = reader(path.name, source.head())
        found = plugin.read(source, Limits()) if plugin else None
    placed = [t for t in found.tensors if t.start >= 0 and t.extent > 8 * PAGE] if found else []
    if not placed:  # the file is compressed or text
        return Target(data, len(data) // 4, len(data) * 3 // 4, other)
    middle = placed[len(placed) // 2]
    return Target(data, middle.start, middle.start + middle.extent, other)


def noticed(folder: Path, listing: Manifest) -> tuple[str, bool]:
    """Return the symbol for the level that detects the damage without a manifest, and whether a manifest detects it."""
    sealed = verify(folder, Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED
    if verify(folder, Level.STRUCTURE).verdict is Verdict.REFUTED:
        return "S", sealed
    verdict = verify(folder, Level.CONTENT).verdict
    return {Verdict.REFUTED: "C", Verdict.UNKNOWN: "?", Verdict.PROVEN: MISSED}[verdict], sealed


def column(name: str) -> dict[str, str]:
    """Return the symbol for each kind of damage to one format. Raises AssertionError if the run must fail."""
    write = FORMATS[name][0]
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder, second = Path(made, "one"), Path(made, "two")
        for place in (folder, second):
            place.mkdir()
        file = write(folder, 0)
        other = (second / write(second, 1)).read_bytes()
        shutil.rmtree(second)
        listing = Manifest.model_validate(manifest.take(folder))
        whole = verify(folder, Level.CONTENT)
        assert whole.verdict is Verdict.PROVEN, f"{name}: intact, and {whole.reasons}"
        intact = target(folder / file, other)
        signs = {}
        for kind, damage in DAMAGE.items():
            data = damage(intact)
            if data == intact.data:
                signs[kind] = ""
                continue
            (folder / file).write_bytes(data)
            signs[kind], sealed = noticed(folder, listing)
            assert sealed, f"{name}: {kind} was not detected with a manifest"
        return signs


def table(names: list[str]) -> str:
    """Return the Markdown table for the given formats."""
    columns = {name: column(name) for name in names}
    rows = [f"| damage | {' | '.join(columns)} |", f"|---|{':-:|' * len(columns)}"]
    rows += [f"| {kind} | {' | '.join(signs[kind] for signs in columns.values())} |" for kind in DAMAGE]
    cells = [sign for signs in columns.values() for sign in signs.values() if sign]
    counts = ", ".join(f"{sign} {cells.count(sign)}" for sign in ("S", "C", "?", MISSED))
    return (
        "\n".join(rows)
        + f"\n\n{LEGEND}. Of {len(cells)} cases: {counts}. "
        + f"Against a manifest that was taken before, all {len(cells)} are refuted.\n"
    )


def main() -> int:
    """Print the table."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--formats", nargs="*", choices=sorted(FORMATS), default=list(FORMATS))
    ask.add_argument("--write", type=Path, default=None, help="a page whose marked block is replaced")
    args = ask.parse_args()
    here = [name for name in args.formats if importlib.util.find_spec(FORMATS[name][1]) is not None]
    for name in args.formats:
        if name not in here:
            print(f"{name} is omitted: {FORMATS[name][1]} is not installed", file=sys.stderr)
    try:
        text = table(here)
    except AssertionError as why:
        print(why, file=sys.stderr)
        return 1
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0], 1)
        args.write.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
