"""Healthy pickles from real libraries: none is refuted at any level; only those that could run code are unknown."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import functools
import importlib.util
import os
import pathlib
import pickle
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import FileEvidence, Level, Verdict
from real_parts import need
from wording import Wording

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LEVELS = [Level.STRUCTURE, Level.CONTENT, Level.LOAD, Level.RESUME]
Maker = Callable[[Path], object]


def there(module: str) -> Any:
    need(module, importlib.util.find_spec(module) is not None)
    return importlib.import_module(module)


def every_level(folder: Path) -> dict[str, dict[Level, FileEvidence]]:
    """Verify all files in a folder at once, so that each level uses one loading process."""
    found: dict[str, dict[Level, FileEvidence]] = {}
    for level in LEVELS:
        for file in verify(folder, level).files:
            found.setdefault(file.path.split("/")[0], {})[level] = file
    return found


def check(folder: Path, unknown: dict[str, Cause | None]) -> None:
    """Check that all are proven but those in `unknown`, which have the given cause; if None, only the load fails."""
    seen = every_level(folder)
    assert set(unknown) <= set(seen) and len(seen) == len(list(folder.iterdir()))
    wrong = []
    for name, files in seen.items():
        for level, file in files.items():
            cause = unknown.get(name)
            if name not in unknown or (cause is None and level in LEVELS[:2]):
                fits = file.verdict is Verdict.PROVEN
            else:
                fits = file.verdict is Verdict.UNKNOWN and file.causes == (cause or Cause.NOT_LOADED,)
            if not fits:
                wrong.append((name, str(level), *file.causes, *file.problems, *file.doubts))
    assert not wrong, "\n".join(map(str, wrong))


def values() -> dict[str, Any]:
    """Return standard library and numpy values that training scripts save beside their tensors."""
    np, torch = there("numpy"), there("torch")
    return {
        "path": pathlib.PosixPath("/data/run"), "pure_path": pathlib.PurePosixPath("run"), "uuid": uuid.uuid4(),
        "namespace": types.SimpleNamespace(lr=0.1, tags=["a"]), "slice": slice(1, 5, 2), "range": range(7),
        "frozenset": frozenset({1, 2}), "set": {"a", "b"}, "bytes": b"abc\xff", "bytearray": bytearray(b"abc"),
        "complex": 1 + 2j, "datetime": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "timedelta": dt.timedelta(days=1), "decimal": decimal.Decimal("1.5"),
        "fraction": fractions.Fraction(1, 3), "deque": collections.deque([1, 2], maxlen=3),
        "counter": collections.Counter("aab"), "defaultdict": collections.defaultdict(list, a=[1]),
        "large": 2**200, "nested": [[[{"a": (1, None, True, 2.5)}]]],
        "np_scalar": np.float64(2.5), "np_array": np.arange(6.0).reshape(2, 3), "np_ints": np.arange(4),
        "np_strings": np.array(["a", "bc"]), "np_bool": np.bool_(True),
        "dataset": torch.utils.data.TensorDataset(torch.ones(3)), "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16, "device": torch.device("cpu"), "generator": torch.Generator().get_state(),
    }  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_ordinary_values_in_a_torch_file_pass(tmp_path: Path, protocol: int) -> None:
    torch = there("torch")
    for name, value in values().items():
        (tmp_path / name).mkdir()
        state = {"w": torch.randn(3, 4), "x": value}
        torch.save(state, tmp_path / name / "model.pt", pickle_protocol=protocol)
    check(tmp_path, {})


@pytest.mark.parametrize("protocol", range(6))
def test_ordinary_values_in_a_plain_pickle_pass(tmp_path: Path, protocol: int) -> None:
    there("torch")
    left_out = {"dataset", "generator"}  # outside torch.save, tensors are pickled as nested files
    for name, value in values().items():
        if name not in left_out:
            (tmp_path / name).mkdir()
            (tmp_path / name / "state.pkl").write_bytes(pickle.dumps({"x": value}, protocol))
    check(tmp_path, {})


def test_concatenated_pickles_pass(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/log.pkl").write_bytes(b"".join(pickle.dumps({"step": n}) for n in range(5)))
    check(tmp_path, {})


class _Model:
    """A user-defined class."""


def test_values_that_need_code_are_unknown(tmp_path: Path) -> None:
    torch, pd = there("torch"), there("pandas")
    made = {
        "partial": functools.partial(int, base=2), "partial_of_a_class": functools.partial(torch.nn.GELU),
        "module": torch.nn.Linear(2, 2), "frame": pd.DataFrame({"a": [1, 2], "b": ["x", "y"]}),
        "own": _Model(), "jagged": torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged),
    }  # fmt: skip
    for name, value in made.items():
        for protocol in (2, 5):
            (tmp_path / f"{name}{protocol}").mkdir()
            torch.save({"x": value}, tmp_path / f"{name}{protocol}/model.pt", pickle_protocol=protocol)
        (tmp_path / f"{name}-legacy").mkdir()
        torch.save({"x": value}, tmp_path / f"{name}-legacy/model.pt", _use_new_zipfile_serialization=False)
    check(tmp_path, {path.name: Cause.NEEDS_CODE for path in tmp_path.iterdir()})


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_partial_that_runs_a_command_is_refuted(tmp_path: Path, protocol: int) -> None:
    torch = there("torch")
    torch.save({"x": functools.partial(os.system, "true")}, tmp_path / "model.pt", pickle_protocol=protocol)
    report = verify(tmp_path / "model.pt", Level.LOAD)
    assert report.verdict is Verdict.REFUTED and report.causes[0] is Cause.RUNS_CODE


def _tensors() -> dict[str, Any]:
    """Return a tensor of every dtype and layout that torch can save."""
    torch = there("torch")
    eye, dice = torch.eye(4), torch.randn(4, 4)
    scales, zeros = torch.full((4,), 0.1), torch.zeros(4, dtype=torch.long)
    channel = torch.quantize_per_channel
    made = {
        "coo": eye.to_sparse(), "csr": eye.to_sparse_csr(), "csc": eye.to_sparse_csc(),
        "bsr": eye.to_sparse_bsr((2, 2)), "bsc": eye.to_sparse_bsc((2, 2)),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        "meta": torch.empty(3, device="meta"), "conj": torch.complex(dice, dice).conj(),
        "qint8": torch.quantize_per_tensor(dice, 0.1, 0, torch.qint8),
        "quint8": torch.quantize_per_tensor(dice, 0.1, 3, torch.quint8),
        "qint32": torch.quantize_per_tensor(dice, 0.1, 0, torch.qint32),
        "qint8_channel": channel(dice, scales, zeros, 0, torch.qint8),
        "quint4x2": channel(dice, scales, zeros.float(), 0, torch.quint4x2),
        "view": dice.t()[1:], "tied": [dice, dice], "empty": torch.empty(0), "scalar": torch.tensor(2.0),
        "parameter": torch.nn.Parameter(dice), "buffer": torch.nn.Buffer(dice),
        "sparse_parameter": torch.nn.Parameter(eye.to_sparse()),
        "twice": [eye.to_sparse()] * 2, "qint8_twice": [channel(dice, scales, zeros, 0, torch.qint8)] * 2,
    }  # fmt: skip
    kinds = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for kind in kinds:
        try:
            made[str(kind)] = torch.zeros(4, 4, dtype=kind)
        except (RuntimeError, NotImplementedError):  # a quantized dtype, made above
            continue
    return made


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_dtypes_and_layouts_that_torch_loads_are_proven_except_meta(tmp_path: Path, zip_format: bool) -> None:
    torch = there("torch")
    broken: dict[str, Cause | None] = {}
    tensors = _tensors()
    if not zip_format:  # torch writes uninitialized sizes, so a load fails at random
        del tensors["nested"]
    for name, tensor in tensors.items():
        path = tmp_path / name / "model.pt"
        path.parent.mkdir()
        try:
            torch.save({"x": tensor}, path, _use_new_zipfile_serialization=zip_format)
        except KeyError:  # torch.save has no name for sub-byte dtypes
            path.unlink(missing_ok=True)
            path.parent.rmdir()
            continue
        try:
            torch.load(path, weights_only=False)
        except AttributeError:  # torch can't load newer dtypes from its own older format
            broken[name] = None
    assert len(list(tmp_path.iterdir())) >= 44 and (not broken or not zip_format)
    check(tmp_path, {**broken, "meta": Cause.UNREAD})


def test_a_file_without_checksums_is_proven_with_a_warning(tmp_path: Path, wording: Wording) -> None:
    torch = there("torch")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.randn(40, 40)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for level in LEVELS[:3]:
        report = verify(tmp_path / "model.pt", level)
        assert report.verdict is Verdict.PROVEN, report.reasons
        wording("\n".join(report.files[0].warnings))
    path = tmp_path / "model.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED


def _script(path: Path) -> None:
    torch = there("torch")
    torch.jit.script(torch.nn.Linear(4, 4)).save(str(path))


def _traced(path: Path) -> None:
    torch = there("torch")
    torch.jit.trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4)).save(str(path))


def _exported(path: Path) -> None:
    torch = there("torch")
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), path)


def _packaged(path: Path) -> None:
    there("torch")
    from torch.package import PackageExporter

    with PackageExporter(str(path)) as out:
        out.save_pickle("model", "state.pkl", {"lr": 0.1})
        out.save_text("notes", "a.txt", "hello")


def _joblib(compress: int) -> Maker:
    def make(path: Path) -> None:
        there("joblib").dump({"w": there("numpy").arange(1000.0)}, path, compress=compress)

    return make


def _ggml(magic: bytes) -> Maker:
    return lambda path: path.write_bytes(magic + bytes(range(256)) * 64)


def _coreml(path: Path) -> None:
    """Write the blob of an .mlpackage: a header of counts, then metadata that begins with a sentinel."""
    head = (2).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(56)
    path.write_bytes(head + (0xDEADBEEF).to_bytes(4, "little") + bytes(range(256)) * 16)


FOREIGN: dict[str, tuple[str, Maker, Cause]] = {
    "script": ("model.pt", _script, Cause.NEEDS_CODE), "traced": ("model.pt", _traced, Cause.NEEDS_CODE),
    "exported_as_pt": ("model.pt", _exported, Cause.UNREAD), "package": ("model.pt", _packaged, Cause.NEEDS_CODE),
    "joblib": ("model.pkl", _joblib(0), Cause.NEEDS_CODE), "joblib_packed": ("model.pkl", _joblib(3), Cause.UNREAD),
    "ggml": ("ggml-model.bin", _ggml(b"lmgg"), Cause.UNREAD), "ggjt": ("ggml-q4.bin", _ggml(b"tjgg"), Cause.UNREAD),
    "coreml": ("weight.bin", _coreml, Cause.UNREAD), "text": ("notes.bin", lambda p: p.write_text("hello\n"),
    Cause.UNREAD),
}  # fmt: skip


def test_other_programs_files_with_torch_names_get_their_verdicts(tmp_path: Path) -> None:
    there("joblib")
    for name, (file, make, _) in FOREIGN.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / file)
    check(tmp_path, {name: cause for name, (_, _, cause) in FOREIGN.items()})


def test_a_scikit_learn_model_is_unknown(tmp_path: Path) -> None:
    tree = there("sklearn.tree") if importlib.util.find_spec("sklearn") else None
    need("sklearn", tree is not None)
    model = tree.DecisionTreeClassifier().fit([[0.0], [1.0]], [0, 1])  # type: ignore[union-attr]
    for name in ("pickled", "joblib"):
        (tmp_path / name).mkdir()
    (tmp_path / "pickled/model.pkl").write_bytes(pickle.dumps(model))
    there("joblib").dump(model, tmp_path / "joblib/model.pkl")
    check(tmp_path, {"pickled": Cause.NEEDS_CODE, "joblib": Cause.NEEDS_CODE})


# ----------------------------------------------------------------------------------------------------- still refuted


def _overwritten(data: bytes) -> dict[str, bytes]:
    return {
        "zeros": bytes(4096) + data[4096:],
        "html": b"<!DOCTYPE html><html><body>403</body></html>",
        "cut": data[: len(data) * 2 // 3],
        "first": b"\xff" + data[1:],
    }


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("how", ["zeros", "html", "cut", "first"])
def test_damage_with_evidence_is_refuted(tmp_path: Path, zip_format: bool, how: str) -> None:
    torch = there("torch")
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.randn(64, 64)}, path, _use_new_zipfile_serialization=zip_format)
    path.write_bytes(_overwritten(path.read_bytes())[how])
    report = verify(path, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED and report.causes == (Cause.DAMAGE,), report.reasons
