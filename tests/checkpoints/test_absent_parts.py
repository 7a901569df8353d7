"""A save with several parts is proven if it is intact, and not proven if a part is missing."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints import examine
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from pickle_kit import zip_file

TENSOR = struct.pack("<Q", 56) + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(56) + b"\0\0\x80\x3f"
INDEX, MODULES, ROUTER = "model_index.json", "modules.json", "router_config.json"
TRACKER = "latest_checkpointed_iteration.txt"


def components(**classes: str) -> str:
    """Return a model_index.json with classes such as "diffusers.AutoencoderKL"; an empty string becomes null."""
    pairs: dict[str, Any] = {name: kind.split(".") if kind else [None, None] for name, kind in classes.items()}
    return json.dumps({"_class_name": "APipeline", "_diffusers_version": "0.35.0", "force_zeros": True, **pairs})


def modules(**classes: str) -> str:
    """Return a modules.json that maps paths to classes; the path `root` stands for the folder itself."""
    paths = {"" if name == "root" else name.removeprefix("_"): kind for name, kind in classes.items()}
    return json.dumps([{"idx": n, "name": str(n), "path": p, "type": paths[p]} for n, p in enumerate(paths)])


ST = "sentence_transformers.models."
UNET, VAE = "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"
SMALL = ("scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json")
POOLING = "1_Pooling/config.json"
STABLE: dict[str, str] = {
    "scheduler": "diffusers.PNDMScheduler", "text_encoder": "transformers.CLIPTextModel",
    "tokenizer": "transformers.CLIPTokenizer", "unet": "diffusers.UNet2DConditionModel",
    "vae": "diffusers.AutoencoderKL",
}  # fmt: skip
FLUX: dict[str, str] = {
    "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler", "text_encoder": "transformers.CLIPTextModel",
    "text_encoder_2": "transformers.T5EncoderModel", "tokenizer": "transformers.CLIPTokenizer",
    "transformer": "diffusers.FluxTransformer2DModel", "vae": "diffusers.AutoencoderKL", "image_encoder": "",
}  # fmt: skip
# Component lists from published models, with the files that matter here in each folder.
SAVES: dict[str, dict[str, str | None]] = {
    "SD 1.5": {
        INDEX: components(
            **STABLE, safety_checker="stable_diffusion.StableDiffusionSafetyChecker",
            feature_extractor="transformers.CLIPImageProcessor", image_encoder="",
        ),
        **dict.fromkeys((*SMALL, UNET, VAE, "text_encoder/model.safetensors", "safety_checker/model.safetensors")),
        "feature_extractor/preprocessor_config.json": None,
    },
    "SDXL": {
        INDEX: components(**STABLE, text_encoder_2="transformers.CLIPTextModelWithProjection", feature_extractor=""),
        **dict.fromkeys((*SMALL, UNET.replace("model.", "model.fp16."), VAE, "text_encoder/model.safetensors")),
        "text_encoder_2/model.safetensors": None,
    },
    "Flux": {
        INDEX: components(**FLUX),
        **dict.fromkeys((*SMALL, VAE, "text_encoder/model.safetensors", "text_encoder_2/model.safetensors")),
        "transformer/diffusion_pytorch_model.safetensors": None,
    },
    "an export": {
        INDEX: components(**STABLE, safety_checker=""),
        **dict.fromkeys((*SMALL, "unet/openvino_model.bin", "text_encoder/openvino_model.bin")),
        **dict.fromkeys(("vae_encoder/openvino_model.bin", "vae_decoder/openvino_model.bin")),
    },
    "one component": {"config.json": None, "diffusion_pytorch_model.safetensors": None},
    "a LoRA": {"pytorch_lora_weights.safetensors": None},
    "MiniLM": {
        MODULES: modules(root=f"{ST}Transformer", _1_Pooling=f"{ST}Pooling", _2_Normalize=f"{ST}Normalize"),
        **dict.fromkeys(("model.safetensors", "config.json", POOLING)),
    },
    "LaBSE": {
        MODULES: modules(root=f"{ST}Transformer", _1_Pooling=f"{ST}Pooling", _2_Dense=f"{ST}Dense"),
        **dict.fromkeys(("model.safetensors", POOLING, "2_Dense/config.json", "2_Dense/model.safetensors")),
    },
    "a LoRA of an encoder": {
        MODULES: modules(root="sentence_transformers.base.modules.transformer.Transformer", _1_Dense=f"{ST}Dense"),
        **dict.fromkeys(("lora.safetensors", "1_Dense/model.safetensors")),
    },
    "CLIP": {MODULES: modules(_0_CLIPModel=f"{ST}CLIPModel"), "0_CLIPModel/model.safetensors": None},
    "an encoder with ONNX": {
        MODULES: modules(root=f"{ST}Transformer", _1_Dense=f"{ST}Dense"),
        **dict.fromkeys(("onnx/model.safetensors", "1_Dense/model.safetensors")),
    },
    "own code": {MODULES: modules(root="custom_st.Transformer", _1_Own="own.Dense"), "1_Own/own.txt": None},
    "a router": {
        MODULES: modules(root=f"{ST}Router"),
        ROUTER: json.dumps({"types": {"query_0_Dense": f"{ST}Dense", "document_0_Dense": f"{ST}Dense"}}),
        **dict.fromkeys(("query_0_Dense/model.safetensors", "document_0_Dense/model.safetensors")),
    },
    "a cross-encoder": dict.fromkeys(("config.json", "model.safetensors", "tokenizer_config.json")),
    "another modules.json": {MODULES: '{"Modules": [{"Key": "", "Source": "", "Dir": "."}]}'},
    "FSDP": dict.fromkeys(f"{kind}_world_size_4_rank_{n}.pt" for kind in ("model", "optim") for n in range(4)),
    "accelerate": dict.fromkeys(f"pytorch_model_fsdp_0_rank{n}.bin" for n in range(3)),
    "Llama": dict.fromkeys(f"consolidated.{n:02}.pth" for n in range(3)),
    "LoRAs": dict.fromkeys(f"lora_rank_{n}.pt" for n in (4, 16)),
    "one per node": dict.fromkeys(f"state_rank_{n}.pt" for n in (0, 8)),
    "DDPM": {
        INDEX: components(unet="diffusers.UNet2DModel", scheduler="diffusers.DDPMScheduler"),
        **dict.fromkeys(("config.json", "diffusion_pytorch_model.safetensors", "scheduler_config.json")),
    },
    "word vectors": {
        MODULES: modules(_0_WordEmbeddings=f"{ST}WordEmbeddings", _1_WordWeights=f"{ST}WordWeights"),
        **dict.fromkeys(("0_WordEmbeddings/model.safetensors", "1_WordWeights/config.json")),
    },
    "Megatron": {TRACKER: "100\n", **dict.fromkeys(f"iter_0000{n}/mp_rank_00/a.pt" for n in ("050", "100"))},
    "Megatron's ranks": {
        TRACKER: "release",
        **dict.fromkeys(f"release/mp_rank_{t:02}_{p:03}/a.pt" for t in range(2) for p in range(3)),
    },
    "verl": {TRACKER: "20", **dict.fromkeys(f"global_step_20/actor/model_world_size_2_rank_{n}.pt" for n in range(2))},
    "DeepSpeed": {"latest": "global_step7", "global_step7/mp_rank_00_model_states.pt": None},
    "DeepSpeed's ranks": dict.fromkeys(f"mp_rank_{n:02}_model_states.pt" for n in range(3)),
    "ZeRO": dict.fromkeys(("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")),
    "DeepSpeed's own tags": {"latest": "b", **dict.fromkeys(f"{n}/mp_rank_00_model_states.pt" for n in "ab")},
    "without DeepSpeed's folder": {"latest": "global_step7", "model.safetensors": None},
    "another latest": {"latest": "epoch3", "epoch_4/model.safetensors": None},
}  # fmt: skip
LOST, UNSURE = (Cause.CONTRADICTION,), (Cause.UNREAD,)
ABSENT: list[tuple[str, str, tuple[Cause, ...]]] = [
    *[("SD 1.5", part, LOST) for part in ("unet/", "vae/", "text_encoder/")],
    *[("SD 1.5", part, UNSURE) for part in ("scheduler/", "tokenizer/", "safety_checker/", "feature_extractor/")],
    ("SDXL", "text_encoder_2/", LOST),
    ("Flux", "transformer/", LOST),
    ("an export", "vae", LOST),
    ("MiniLM", "1_Pooling/", UNSURE),
    ("MiniLM", "model.safetensors", UNSURE),
    ("LaBSE", "2_Dense/", LOST),
    ("LaBSE", "2_Dense/model", LOST),
    ("LaBSE", "model.safetensors", LOST),
    ("CLIP", "0_CLIPModel/", UNSURE),
    ("own code", "1_Own/", UNSURE),
    ("a router", "document_0_Dense/", LOST),
    ("FSDP", "model_world_size_4_rank_3", UNSURE),
    ("FSDP", "optim_world_size_4_rank_0", UNSURE),
    ("accelerate", "pytorch_model_fsdp_0_rank0", UNSURE),
    ("Llama", "consolidated.01", UNSURE),
    ("Megatron", "iter_0000100/", LOST),
    ("Megatron", "iter_", UNSURE),
    ("Megatron's ranks", "release/", UNSURE),
    ("Megatron's ranks", "release/mp_rank_00_001/", UNSURE),
    ("verl", "global_step_20/actor/model_world_size_2_rank_1", UNSURE),
    ("DeepSpeed", "global_step7/", UNSURE),
    ("DeepSpeed's ranks", "mp_rank_00", UNSURE),
    ("DeepSpeed's ranks", "mp_rank_01", UNSURE),
    ("ZeRO", "mp_rank_00", UNSURE),
    ("DeepSpeed's own tags", "b/", LOST),
]


def lay(root: Path, files: dict[str, str | None], without: str = "-") -> Path:
    for name, text in files.items():
        path = root / name
        if name.startswith(without):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
        elif name.endswith((".pt", ".pth", ".bin")):
            zip_file(path, pickle.dumps({"step": 1}, 2))
        else:
            path.write_bytes(TENSOR if name.endswith(".safetensors") else b"{}")
    return root


def look(root: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(examine, "GAVE_UP", ())  # let exceptions in a layout propagate
    return verify(root, Level.STRUCTURE)


@pytest.mark.parametrize("save", SAVES)
def test_an_intact_save_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str) -> None:
    report = look(lay(tmp_path, SAVES[save]), monkeypatch)
    assert report.verdict is Verdict.PROVEN, report.reasons


@pytest.mark.parametrize(("save", "without", "causes"), ABSENT)
def test_a_save_with_a_missing_part_is_not_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str, without: str, causes: tuple[Cause, ...]
) -> None:
    assert look(lay(tmp_path, SAVES[save], without), monkeypatch).causes == causes


def test_an_empty_folder_is_not_a_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, SAVES["SD 1.5"], "scheduler/")
    (tmp_path / "scheduler").mkdir()
    assert look(tmp_path, monkeypatch).causes == UNSURE


def test_an_index_without_any_weights_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, {name: text for name, text in SAVES["SD 1.5"].items() if name in (INDEX, *SMALL)})
    assert look(tmp_path, monkeypatch).causes == UNSURE


def test_a_component_missing_from_a_hub_cache_is_doubted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path / "out/hub/models--b--flux/snapshots/0a1b", SAVES["Flux"], "transformer/")
    assert look(tmp_path / "out", monkeypatch).causes == UNSURE


@pytest.mark.parametrize(("inside", "causes"), [(True, ()), (False, UNSURE)])
def test_a_linked_component_is_not_refuted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, causes: tuple[Cause, ...]
) -> None:
    pipe = lay(tmp_path / "run/pipe", SAVES["SD 1.5"], "vae/")
    shared = tmp_path / ("run/shared" if inside else "shared")
    lay(shared, dict.fromkeys((VAE, UNET)))
    (pipe / "vae").symlink_to(shared / "vae")
    (pipe / UNET).unlink()
    (pipe / UNET).symlink_to(shared / UNET)
    assert look(tmp_path / "run", monkeypatch).causes == causes


def rows(paths: Iterable[Any], kind: Any = f"{ST}Dense") -> list[Any]:
    return [{"path": path, "type": kind} for path in ("", *paths)]


HOSTILE: list[tuple[str, Any]] = [
    (INDEX, []), (INDEX, 5), (INDEX, {"unet": 5}), (INDEX, {"unet": ["diffusers"]}), (INDEX, {"unet": [{}, []]}),
    (INDEX, {"unet": ["diffusers", None]}), (INDEX, {"": ["", ""]}), (MODULES, None), (MODULES, [5, [], {}]),
    (MODULES, rows([5, None, []])), (MODULES, [{"path": "", "type": 5}]), (MODULES, {"types": 5}),
    (ROUTER, {"types": {"a": 5}}), (ROUTER, []), (TRACKER, "\0"), (TRACKER, "٣"), (TRACKER, "9" * 99),
]  # fmt: skip


@pytest.mark.parametrize(("file", "content"), HOSTILE)
def test_malformed_lists_refute_nothing_and_malformed_trackers_prove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: Any
) -> None:
    text = content if file == TRACKER else json.dumps(content)
    lay(tmp_path, {file: text, "model.safetensors": None})
    assert look(tmp_path, monkeypatch).verdict is not (Verdict.PROVEN if file == TRACKER else Verdict.REFUTED)


@pytest.mark.parametrize("path", ["../other", "{}/other", "/", "a/../../other", "..", "x" * 9_000, "a\0b", "./1/."])
def test_a_listed_path_is_never_followed_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    lay(tmp_path / "other", {"model.safetensors": None})
    listed = json.dumps(rows([path.format(tmp_path)]))
    lay(tmp_path / "model", {MODULES: listed, "model.safetensors": None})
    assert look(tmp_path / "model", monkeypatch).causes == LOST


def test_huge_rank_numbers_in_names_give_only_two_doubts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{n}_world_size_999999_rank_999998.pt" for n in range(50)] + ["mp_rank_999999_model_states.pt"]
    lay(tmp_path, dict.fromkeys(names))
    report = look(tmp_path, monkeypatch)
    assert report.causes == UNSURE and len(report.doubts) == 2
