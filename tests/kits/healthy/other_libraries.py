"""Write the files of the libraries around torch: numpy, GGUF, ONNX, JAX, Keras, boosted trees, pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from healthy import configuration, family
from healthy.hub_models import build, tokenizer
from healthy.torch_files import torch

NUMPY = (
    "f2",
    "f4",
    "f8",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "?",
    "c8",
    "c16",
    ">f4",
    ">i4",
    "U5",
    "S5",
    "M8[s]",
    "m8[ms]",
    "V4",
)


def _array(dtype: str) -> Any:
    import numpy as np

    made = np.random.default_rng(0).integers(0, 100, (8, 8))
    return made.astype("u4").view("V4") if dtype == "V4" else made.astype(dtype)


@family("numpy npy", NUMPY, "numpy")
def npy(at: Path, dtype: str) -> None:
    import numpy as np

    np.save(at / "array.npy", _array(dtype))
    np.save(at / "fortran.npy", np.asfortranarray(_array(dtype)))


@configuration("numpy npz", "numpy")
def npz(at: Path) -> None:
    import numpy as np

    arrays = {f"a{i}": _array(d) for i, d in enumerate(NUMPY)}
    np.savez(at / "plain.npz", **arrays)
    np.savez_compressed(at / "packed.npz", **arrays)


@configuration("numpy structured and empty", "numpy")
def structured(at: Path) -> None:
    import numpy as np

    np.save(at / "rows.npy", np.zeros(5, dtype=[("a", "f4"), ("b", "i8", (2,))]))
    np.save(at / "empty.npy", np.zeros((0, 3)))
    np.save(at / "scalar.npy", np.float64(3.5))


# -------------------------------------------------------------------------------------------------------------- GGUF

QUANTS = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
)
# No Python library writes these; their blocks are filled with bytes that give finite scales.
BLOCKS = (
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "IQ1_M",
    "NVFP4",
    "Q1_0",
)


def _gguf(path: Path, kind: str, split: int = 0, splits: int = 0) -> None:
    import gguf
    import numpy as np

    wanted = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(256)
    if splits:
        writer.add_uint16("split.no", split)
        writer.add_uint16("split.count", splits)
        writer.add_int32("split.tensors.count", splits)
    values = np.random.default_rng(split).normal(size=(4, 256)).astype("f4")
    if kind in BLOCKS:
        block, size = gguf.GGML_QUANT_SIZES[wanted]
        # A byte of 0x11 gives a small finite number in each of the scales' types.
        data = np.full((4, 256 // block * size), 0x11, np.uint8)
        writer.add_tensor(f"blk.{split}.ffn_up.weight", data, raw_dtype=wanted)
    elif kind[0] == "I" or kind == "F64":
        writer.add_tensor(
            f"blk.{split}.ffn_up.weight", values.astype(kind.lower().replace("i", "int").replace("f", "float"))
        )
    else:
        data = gguf.quants.quantize(values, wanted)
        writer.add_tensor(f"blk.{split}.ffn_up.weight", data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@family("GGUF", QUANTS + BLOCKS, "gguf", "numpy")
def gguf_file(at: Path, kind: str) -> None:
    _gguf(at / "model.gguf", kind)


@configuration("GGUF in parts", "gguf", "numpy")
def gguf_split(at: Path) -> None:
    for n in range(3):
        _gguf(at / f"model-{n + 1:05}-of-00003.gguf", "F16", n, 3)


@configuration("GGUF parts of gguf's own writer", "gguf", "numpy")
def gguf_own_split(at: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(at / "model.gguf", "llama", split_max_tensors=2)
    for n in range(5):
        writer.add_tensor(f"blk.{n}.ffn_up.weight", np.ones((4, 32), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@configuration("GGUF with metadata of every type", "gguf", "numpy")
def gguf_metadata(at: Path) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(at / "model.gguf", "llama")
    for name, value in (
        ("bool", True),
        ("string", "x"),
        ("float32", 1.5),
        ("int32", -3),
        ("uint64", 5),
        ("float64", 0.5),
    ):
        getattr(writer, f"add_{name}")(f"own.{name}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(50)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 50)
    writer.add_tensor("token_embd.weight", np.ones((50, 32), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -------------------------------------------------------------------------------------------------------------- ONNX


def _onnx(raw: bool = True) -> Any:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).normal(size=(16, 16)).astype("f4")
    stored = (
        numpy_helper.from_array(weight, "w")
        if raw
        else helper.make_tensor("w", TensorProto.FLOAT, (16, 16), weight.ravel())
    )
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, 16)) for n in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [stored])
    return onnx, helper.make_model(graph)


@family("ONNX", {"raw data": True, "float data": False}, "onnx", "numpy")
def onnx_file(at: Path, raw: bool) -> None:
    onnx, made = _onnx(raw)
    onnx.save(made, at / "model.onnx")


@configuration("ONNX with external data", "onnx", "numpy")
def onnx_external(at: Path) -> None:
    onnx, made = _onnx()
    onnx.save_model(made, at / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=16)


# --------------------------------------------------------------------------------------------------------- JAX, Keras


@configuration("flax msgpack", "flax", "jax")
def flax_msgpack(at: Path) -> None:
    import flax.serialization
    import jax.numpy as jnp

    made = {"params": {"dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.zeros(8, jnp.bfloat16)}}, "step": 3}
    (at / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(made))


@configuration("orbax", "orbax.checkpoint", "jax")
def orbax(at: Path) -> None:
    import numpy as np
    import orbax.checkpoint as ocp

    state = {"params": {"w": np.ones((64, 64), "f4")}, "step": 2}
    with ocp.CheckpointManager(at / "out", options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()


def _keras() -> Any:
    import os

    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])


@family("Keras", ("model.keras", "model.weights.h5", "model.h5"), "keras", "h5py")
def keras_file(at: Path, name: str) -> None:
    made = _keras()
    made.save_weights(at / name) if "weights" in name else made.save(at / name)


@configuration("h5py", "h5py", "numpy")
def hdf5(at: Path) -> None:
    import h5py
    import numpy as np

    with h5py.File(at / "data.h5", "w") as file:
        file["a/b"] = np.random.default_rng(0).normal(size=(32, 32))
        file.create_dataset("packed", data=np.arange(1000), chunks=(100,), compression="gzip", fletcher32=True)
        file.attrs["step"] = 3


# ------------------------------------------------------------------------------------- scikit-learn and boosted trees


def _rows() -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4))
    return x, (x[:, 0] > 0).astype(int)


@configuration("scikit-learn with joblib", "sklearn", "joblib", unknown=("*.joblib",))
def sklearn_joblib(at: Path) -> None:
    import joblib
    from sklearn.linear_model import LogisticRegression

    joblib.dump(LogisticRegression().fit(*_rows()), at / "model.joblib")


@configuration("joblib of arrays", "joblib", "numpy", unknown=("*.pkl",))
def joblib_arrays(at: Path) -> None:
    import joblib

    joblib.dump({"x": _rows()[0]}, at / "data.pkl")


@family("XGBoost", ("model.json", "model.ubj"), "xgboost")
def xgboost_file(at: Path, name: str) -> None:
    import xgboost

    made = xgboost.XGBClassifier(n_estimators=3, max_depth=2).fit(*_rows())
    made.save_model(at / name)


@configuration("LightGBM", "lightgbm")
def lightgbm_file(at: Path) -> None:
    import lightgbm

    x, y = _rows()
    lightgbm.train({"verbose": -1, "num_threads": 1}, lightgbm.Dataset(x, y), 3).save_model(at / "model.txt")


@configuration("pickle of plain values", unknown=())
def plain_pickle(at: Path) -> None:
    import pickle

    (at / "vocab.pkl").write_bytes(pickle.dumps({"stoi": {"a": 1}, "itos": ["a"], "n": 2.5}))


# ---------------------------------------------------------------------------------------------------------- pipelines


@configuration("diffusers pipeline", "diffusers", "torch")
def diffusers_pipeline(at: Path) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    torch()
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(at)


@configuration("diffusers latent pipeline", "diffusers", "torch", "transformers")
def diffusers_latent(at: Path) -> None:
    from diffusers import AutoencoderKL, DDIMScheduler

    torch()
    made = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8)
    made.save_pretrained(at / "vae")
    DDIMScheduler().save_pretrained(at / "scheduler")
    build("BERT").save_pretrained(at / "text_encoder")
    tokenizer().save_pretrained(at / "tokenizer")
    index = {"_class_name": "OwnPipeline", "_diffusers_version": "0.30.0", "vae": ["diffusers", "AutoencoderKL"]}
    (at / "model_index.json").write_text(json.dumps(index))


@configuration("sentence-transformers", "sentence_transformers", "torch", "transformers")
def sentences(at: Path) -> None:
    from sentence_transformers import SentenceTransformer, models

    build("BERT").save_pretrained(at / "base")
    words = tokenizer()
    words.save_pretrained(at / "base")
    made = models.Transformer(str(at / "base"))
    SentenceTransformer(modules=[made, models.Pooling(32)], device="cpu").save(str(at / "whole"))


@configuration("Stable-Baselines3", "stable_baselines3", "torch")
def baselines(at: Path) -> None:
    from stable_baselines3 import PPO

    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu").save(at / "ppo.zip")


@configuration("TensorBoard events", "torch", "tensorboard")
def events(at: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(at / "runs")) as writer:
        writer.add_scalar("loss", 1.5, 1)


@configuration("pictures and tables beside a model", "PIL", "pyarrow", "torch")
def aside(at: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet
    from PIL import Image

    Image.new("RGB", (8, 8), "red").save(at / "sample.png")
    Image.new("RGB", (8, 8), "red").save(at / "sample.jpg")
    pyarrow.parquet.write_table(pa.table({"a": [1, 2]}), at / "train.parquet")
    (at / "results.csv").write_text("step,loss\n1,0.5\n")
    (at / "config.yaml").write_text("lr: 0.1\n")
    torch().save({"w": torch().ones(3)}, at / "model.pt")
