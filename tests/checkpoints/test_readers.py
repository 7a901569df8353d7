"""Files written by Keras, flax, XGBoost, and Stable-Baselines3: no false alarm, and damage is detected."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuwarden.checkpoints import examine
from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values.lookup3 import lookup3
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording

pytestmark = pytest.mark.filterwarnings("ignore")


def want(*modules: str) -> None:
    for name in modules:
        need(name, importlib.util.find_spec(name) is not None)


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def array(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(64, 48)).astype("f4")


# --------------------------------------------------------------------------------------------------------- the writers


def hdf5(path: Path, **how: Any) -> None:
    want("h5py")
    import h5py

    with h5py.File(path, "w", **how) as file:
        for i in range(5):
            group = file.create_group(f"layer{i}")
            group["kernel"], group["bias"] = array(i), np.zeros(64, "f2")
        more = file.create_group("more")
        more.create_dataset("chunked", data=array(), chunks=(16, 16), compression="gzip")
        more["text"], more["texts"], more["flag"], more["scalar"] = "x", ["a", "bb"], np.ones(3, bool), 3.0
        more["empty"] = h5py.Empty("f4")


def new_hdf5(path: Path) -> None:
    hdf5(path, libver="latest")


def flax(path: Path) -> None:
    want("flax")
    from flax import serialization

    tree = {"params": {"dense": {"kernel": array(), "half": array().astype("f2")}}, "step": np.int32(3), "c": 1 + 2j}
    path.write_bytes(serialization.to_bytes(tree))


def like_flax(path: Path) -> None:
    """Write a file as flax does, with the serialization library that flax uses."""
    want("msgpack")
    import msgpack

    def ext(value: Any) -> Any:
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True))

    tree = {"params": {"dense": {"kernel": array(), "half": array().astype("f2")}}, "step": 3, "none": [None, True]}
    path.write_bytes(msgpack.packb(tree, default=ext, strict_types=True))


def xgboost(path: Path) -> None:
    want("xgboost")
    import xgboost

    data = xgboost.DMatrix(array(), array()[:, 0] * array()[:, 1] > 0)
    xgboost.train({"objective": "binary:logistic", "nthread": 1}, data, 5).save_model(path)


def text(value: str) -> bytes:
    return b"L" + struct.pack(">q", len(value)) + value.encode()


def like_xgboost(path: Path, trees: int = 2) -> None:
    """Write a model of two trees as XGBoost does."""
    numbers = array().ravel()[:500].astype(">f4")
    tree = b"{" + text("split_conditions") + b"[$d#L" + struct.pack(">q", 500) + numbers.tobytes() + b"}"
    param = b"{" + text("num_trees") + b"S" + text(str(trees)) + b"}"
    model = b"{" + text("gbtree_model_param") + param + text("trees") + b"[#L" + struct.pack(">q", 2) + tree * 2 + b"}"
    booster = b"{" + text("model") + model + text("name") + b"S" + text("gbtree") + b"}"
    learner = b"{" + text("gradient_booster") + booster + b"}"
    path.write_bytes(
        b"{" + text("learner") + learner + text("version") + b"[#L" + struct.pack(">qBBBB", 1, 105, 3, 125, 0)[:-1]
    )


def keras(path: Path) -> None:
    """Write an archive as Keras does: two text files and an HDF5 file, stored without compression."""
    inner = path.with_suffix(".weights")
    hdf5(inner)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        archive.writestr("config.json", json.dumps({"module": "keras", "class_name": "Sequential", "config": {}}))
        archive.writestr("model.weights.h5", inner.read_bytes())
    inner.unlink()


def baselines(path: Path, setting: bytes = b"\x80\x05}.") -> None:
    """Write an archive as Stable-Baselines3 does."""
    want("torch")
    import torch

    with zipfile.ZipFile(path, "w") as archive:
        pickled = {":type:": "x", ":serialized:": base64.b64encode(setting).decode()}
        archive.writestr("data", json.dumps({"policy_class": pickled, "gamma": 0.99}))
        for name in ("policy", "policy.optimizer"):
            with archive.open(f"{name}.pth", "w", force_zip64=True) as file:
                buffer = io.BytesIO()
                torch.save({"w": torch.from_numpy(array())}, buffer)
                file.write(buffer.getvalue())
        archive.writestr("_stable_baselines3_version", "2.9.2")
        archive.writestr("system_info.txt", "- OS: x")


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "hdf5": ("model.h5", hdf5),
    "hdf5 new": ("model.hdf5", new_hdf5),
    "flax": ("flax_model.msgpack", flax),
    "msgpack": ("flax_model.msgpack", like_flax),
    "xgboost": ("model.ubj", xgboost),
    "ubjson": ("model.ubj", like_xgboost),
    "keras": ("model.keras", keras),
    "baselines": ("ppo.zip", baselines),
}


@pytest.fixture(params=sorted(WRITERS))
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name, write = WRITERS[request.param]
    write(tmp_path / name)
    return tmp_path / name


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("level", [Level.STRUCTURE, Level.CONTENT, Level.LOAD])
def test_a_whole_file_is_proven(made: Path, level: Level) -> None:
    report = verify(made, level)
    assert report.verdict is Verdict.PROVEN, seen(report)


def test_cut_files_are_refuted_and_padded_files_not_proven(made: Path) -> None:
    whole = made.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 20):
        os.truncate(made, cut)
        assert verify(made, Level.STRUCTURE).verdict is Verdict.REFUTED, cut
        made.write_bytes(whole)
    made.write_bytes(whole + bytes(100))
    assert verify(made, Level.STRUCTURE).verdict is not Verdict.PROVEN


def test_a_non_finite_value_is_found(made: Path) -> None:
    with Source(made) as source:
        plugin = reader(made.name, source.head())
        assert plugin is not None
        found = plugin.read(source, Limits())
    target = next(t for t in found.tensors if t.dtype == "F32" and t.start >= 0 and t.extent >= 20)
    data = bytearray(made.read_bytes())
    nan = np.array([np.nan], ">f4" if found.big_endian else "<f4").tobytes()
    data[target.start + 8 : target.start + 12] = nan
    made.write_bytes(data)
    report = verify(made, Level.CONTENT)
    assert report.verdict is Verdict.REFUTED
    assert Cause.NOT_FINITE in report.causes


def test_single_byte_changes_never_crash_a_reader(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "GAVE_UP", ())  # let exceptions in a reader propagate
    whole = made.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole)
        data[int(rng.integers(min(len(data), 4000)))] = int(rng.integers(256))
        made.write_bytes(data)
        assert verify(made, Level.STRUCTURE).files


def test_lookup3_matches_its_authors_values() -> None:
    phrase = b"Four score and seven years ago"
    assert (lookup3(b""), lookup3(phrase)) == (0xDEADBEEF, 0x17770551)


def test_newer_metadata_is_checked_against_its_checksum(tmp_path: Path, wording: Wording) -> None:
    new_hdf5(tmp_path / "m.h5")
    data = bytearray((tmp_path / "m.h5").read_bytes())
    data[data.index(b"OHDR") + 12] ^= 1
    (tmp_path / "m.h5").write_bytes(data)
    wording(seen(verify(tmp_path / "m.h5", Level.STRUCTURE)))


def test_a_missing_tree_is_reported(tmp_path: Path, wording: Wording) -> None:
    like_xgboost(tmp_path / "m.ubj", trees=3)
    wording(seen(verify(tmp_path, Level.STRUCTURE)), 3, 2)


def test_a_lambda_layer_is_not_proven(tmp_path: Path, wording: Wording) -> None:
    want("h5py")
    import h5py

    keras(tmp_path / "m.keras")
    layer = {"class_name": "Sequential", "config": {"layers": [{"module": "keras.layers", "class_name": "Lambda"}]}}
    with zipfile.ZipFile(tmp_path / "m.keras") as old, zipfile.ZipFile(tmp_path / "n.keras", "w") as new:
        for name in old.namelist():
            new.writestr(name, json.dumps(layer) if name == "config.json" else old.read(name))
    hdf5(tmp_path / "m.h5")
    with h5py.File(tmp_path / "m.h5", "a") as file:
        file.attrs["model_config"] = json.dumps(layer)
    for name in ("n.keras", "m.h5"):
        report = verify(tmp_path / name, Level.LOAD)
        assert report.verdict is Verdict.UNKNOWN and report.causes == (Cause.NEEDS_CODE,)
        wording(seen(report), "Lambda")


def test_a_keras_model_naming_a_python_builtin_is_refuted(tmp_path: Path, wording: Wording) -> None:
    keras(tmp_path / "m.keras")
    evil = {"module": "builtins", "class_name": "exec", "config": {}}
    with zipfile.ZipFile(tmp_path / "m.keras") as old, zipfile.ZipFile(tmp_path / "n.keras", "w") as new:
        for name in old.namelist():
            new.writestr(name, json.dumps(evil) if name == "config.json" else old.read(name))
    report = verify(tmp_path / "n.keras", Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED and Cause.RUNS_CODE in report.causes
    wording(seen(report))


def test_a_pickled_setting_is_judged(tmp_path: Path, wording: Wording) -> None:
    baselines(tmp_path / "evil.zip", b"cposix\nsystem\n(S'id'\ntR.")
    report = verify(tmp_path / "evil.zip", Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED and Cause.RUNS_CODE in report.causes
    wording(seen(report), "policy_class")
    baselines(tmp_path / "own.zip", b"\x80\x02cmine.policies\nPolicy\n.")
    assert verify(tmp_path / "own.zip", Level.LOAD).verdict is Verdict.UNKNOWN


@pytest.mark.slow
def test_stable_baselines_archives_are_proven(tmp_path: Path) -> None:
    want("stable_baselines3", "torch")
    from stable_baselines3 import A2C, DQN, PPO, SAC, TD3

    for kind in (A2C, DQN, PPO, SAC, TD3):
        world = "Pendulum-v1" if kind in (SAC, TD3) else "CartPole-v1"
        kind("MlpPolicy", world).save(tmp_path / f"{kind.__name__}.zip")
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)


@pytest.mark.slow
def test_keras_models_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want("torch", "keras", "h5py")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    import keras as library

    layers = library.layers
    model = library.Sequential([layers.Input((16,)), layers.Dense(32), layers.LayerNormalization(), layers.Dense(4)])
    model.compile("adam", "mse")
    model.fit(array()[:, :16], array()[:, :4], verbose=0)
    (tmp_path / "saved").mkdir()
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / "saved" / name)
    model.save_weights(tmp_path / "saved" / "model.weights.h5")
    report = verify(tmp_path / "saved", Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)


@pytest.mark.slow
def test_torch_files_named_pth_tar_are_proven(tmp_path: Path) -> None:
    want("torch")
    import torch

    for new in (True, False):
        torch.save(
            {"epoch": 3, "state_dict": {"w": torch.from_numpy(array())}},
            tmp_path / f"best-{new}.pth.tar",
            _use_new_zipfile_serialization=new,
        )
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)


@pytest.mark.slow
def test_level_load_reads_many_links_and_packed_chunks_with_h5py(tmp_path: Path, wording: Wording) -> None:
    """A group with many links, and compressed chunks."""
    want("h5py")
    import h5py

    with h5py.File(tmp_path / "m.h5", "w", libver="latest") as file:
        for i in range(20):
            file[f"layer{i}"] = array(i)
        file.create_dataset("packed", data=np.where(array() > 2, np.nan, array()), chunks=(16, 16), compression="gzip")
    assert verify(tmp_path / "m.h5", Level.CONTENT).verdict is Verdict.PROVEN
    report = verify(tmp_path / "m.h5", Level.LOAD)
    assert report.causes == (Cause.NOT_FINITE,) and "packed" in seen(report)
    with h5py.File(tmp_path / "m.h5", "a") as file:
        del file["packed"]
    report = verify(tmp_path / "m.h5", Level.LOAD)
    wording(report.files[0].proved[-1], "h5py", 20, "61,440")
