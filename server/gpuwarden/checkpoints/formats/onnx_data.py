"""Read an ONNX model's external data: a file that is named after the model and contains its weights."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Limits, Tensor, Unread
from gpuwarden.checkpoints.formats import onnx
from gpuwarden.checkpoints.safe_file import Source

NAME = "onnx data"
LOAD = "tensors"
_PADDING = 4095


def claims(name: str, head: bytes) -> bool:
    """Return true for names such as model.onnx.data, model.onnx_data and model.onnx_data_1."""
    model, ending, rest = name.partition(".onnx")
    return bool(model and ending) and rest.startswith((".data", "_data", ".weights", "_weights"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Locate the weights in this file. The model in the same folder lists their offsets."""
    found = Anatomy(NAME)
    name = source.name.rsplit("/", 1)[-1]
    model = source.beside(name.partition(".onnx")[0] + ".onnx")
    if model is None:
        raise Unread("contains external data for an ONNX model, but the model is not in this folder")
    with model:
        _, external = onnx.walk(model)
    mine = [e for e in external if e.location == name]
    if not mine:
        raise Unread(f"is not used by {model.path.name}: none of the model's weights refers to it")
    for e in mine:
        if e.offset + e.length > source.size:
            raise Broken(f"ends at byte {source.size:,}; weight {e.name[:60]} needs {e.offset + e.length:,}")
        found.tensors.append(Tensor(e.name, e.dtype, e.shape, e.offset, e.length))
    found.tensors.sort(key=lambda t: t.start)
    last = max(t.start + t.extent for t in found.tensors)
    rest = source.at(last, min(source.size - last, _PADDING + 1))
    if len(rest) > _PADDING or any(rest):
        found.doubt(f"{source.size - last:,} bytes after its last weight are not part of any weight")
    found.proved.append(f"contains the bytes of {len(mine):,} weights in {model.path.name}")
    return found
