"""ONNX models written by the `onnx` library: weights in every field, external data, and damage in each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def onnx() -> Any:
    need("onnx", importlib.util.find_spec("onnx") is not None)
    import onnx

    return onnx


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def model(onnx: Any, weights: list[Any], nodes: list[Any] | None = None) -> Any:
    h, t = onnx.helper, onnx.TensorProto
    node = h.make_node("Identity", ["w0"], ["y"])
    out = h.make_tensor_value_info("y", t.FLOAT, None)
    return h.make_model(h.make_graph([*(nodes or []), node], "g", [], [out], initializer=weights))


def array(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(64, 48)).astype("f4")


def proven(path: Path) -> Report:
    report = verify(path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    return report


@pytest.mark.parametrize("raw", [True, False])
def test_every_type_written_by_the_library_is_proven(onnx: Any, tmp_path: Path, raw: bool) -> None:
    weights = []
    for i, (number, name) in enumerate(sorted((v, k) for k, v in onnx.TensorProto.DataType.items())):
        if name in ("UNDEFINED", "STRING"):
            continue
        kind = onnx.helper.tensor_dtype_to_np_dtype(number)
        values = (np.arange(24).reshape(4, 6) % 2 + 1).astype(kind)
        if raw:
            weights.append(onnx.numpy_helper.from_array(values, f"w{i}"))
        else:
            weights.append(onnx.helper.make_tensor(f"w{i}", number, values.shape, values.ravel()))
    weights.append(onnx.helper.make_tensor("texts", onnx.TensorProto.STRING, [2], [b"a", b"b"]))
    onnx.save(model(onnx, weights), tmp_path / "m.onnx")
    proven(tmp_path)


@pytest.mark.parametrize("field", ["FLOAT", "DOUBLE"])
def test_typed_number_fields_are_scanned(onnx: Any, tmp_path: Path, field: str) -> None:
    values = array().ravel()
    values[5] = np.nan
    weight = onnx.helper.make_tensor("w0", onnx.TensorProto.DataType.Value(field), (64, 48), values)
    onnx.save(model(onnx, [weight]), tmp_path / "m.onnx")
    report = verify(tmp_path, Level.CONTENT)
    assert report.causes == (Cause.NOT_FINITE,) and "w0" in seen(report)


def test_a_constant_inside_a_node_is_scanned(onnx: Any, tmp_path: Path) -> None:
    value = onnx.numpy_helper.from_array(np.full((2, 2), np.inf, "f4") * np.array([[1, -1], [1, 1]], "f4"), "c0")
    node = onnx.helper.make_node("Constant", [], ["c"], value=value)
    onnx.save(model(onnx, [onnx.numpy_helper.from_array(array(), "w0")], [node]), tmp_path / "m.onnx")
    report = verify(tmp_path, Level.CONTENT)
    assert report.causes == (Cause.NOT_FINITE,) and "c0" in seen(report)


def test_a_field_with_number_0_is_damage(onnx: Any, tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(onnx, [onnx.numpy_helper.from_array(array(), "w0")]), path)
    path.write_bytes(path.read_bytes() + b"\0\0")
    wording(seen(verify(path, Level.STRUCTURE)), 0)


@pytest.fixture
def outside(onnx: Any, tmp_path: Path) -> Path:
    """A model whose weights are in a file beside it."""
    made = model(onnx, [onnx.numpy_helper.from_array(array(i), f"w{i}") for i in range(4)])
    onnx.save_model(
        made, tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0
    )  # fmt: skip
    return tmp_path


def test_external_data_is_part_of_the_model(outside: Path, wording: Wording) -> None:
    report = proven(outside)
    wording("\n".join(line for f in report.files for line in f.proved), "m.onnx.data")


def test_cut_missing_or_non_finite_external_data_is_reported(outside: Path, wording: Wording) -> None:
    data = outside / "m.onnx.data"
    whole = data.read_bytes()
    os.truncate(data, len(whole) - 100)
    wording(seen(verify(outside, Level.STRUCTURE)), "w3")
    data.unlink()
    wording(seen(verify(outside, Level.STRUCTURE)), "m.onnx.data", 4)
    bad = bytearray(whole)
    bad[4000:4004] = np.float32("nan").tobytes()
    data.write_bytes(bad)
    report = verify(outside, Level.CONTENT)
    assert report.causes == (Cause.NOT_FINITE,) and "w0" in seen(report)


@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "", "c:/x"])
def test_external_data_outside_of_the_folder_is_not_opened(
    onnx: Any, tmp_path: Path, location: str, wording: Wording
) -> None:
    weight = onnx.numpy_helper.from_array(array(), "w0")
    onnx.external_data_helper.set_external_data(weight, location=location)
    weight.ClearField("raw_data")
    (tmp_path / "m.onnx").write_bytes(model(onnx, [weight]).SerializeToString())
    wording(seen(verify(tmp_path, Level.STRUCTURE)))
