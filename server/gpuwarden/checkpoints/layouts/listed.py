"""Check that the components that a diffusers pipeline or sentence-transformers model lists exist.

The list names each component's folder and class, but no files. If the class has weights, the folder must contain a
weight file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from gpuwarden.checkpoints.file_model import some
from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.layouts.stepped import like_weights
from gpuwarden.checkpoints.tree import Folder

NAME = "components"
_FLAT = {"diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"}
_CACHED = re.compile(r"(?:^|/)models--[^/]+/snapshots/")
# The diffusers and transformers classes that have weights. Schedulers, tokenizers and processors have none.
_MODEL = re.compile(r"Model|UNet|Transformer|Autoencoder|VAE|For[A-Z]")
_OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")  # pipelines also run without them
_MODULES = frozenset({
    "CLIPModel", "CNN", "Dense", "LSTM", "LayerNorm", "MLMTransformer", "SparseAutoEncoder", "StaticEmbedding",
    "Transformer", "WeightedLayerPooling", "WordEmbeddings",
})  # fmt: skip


def claims(folder: Folder) -> bool:
    """Return true for a folder with a list of components."""
    return any(name in folder.files for name in _LISTS) and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that each component exists, and that it has weights if its class requires them."""
    judgement = Judgement(NAME, folder.rel)
    for name, read in _LISTS.items():
        listed = {str(PurePosixPath(path)): needed for path, needed in read(found.parsed(folder.join(name)))}
        held = {path: _held(folder, path, listed) for path in listed}
        bare = [path for path, needed in listed.items() if needed and not held[path]]
        gone = [path for path, needed in listed.items() if not needed and held[path] is None]
        if bare:
            # If no component has weights, the list was probably copied without its model. A Hub cache lacks the
            # components that the program passed to the pipeline.
            lines = judgement.problems if any(held.values()) and not _CACHED.search(folder.rel) else judgement.doubts
            names = ("the folder itself" if path == "." else path for path in bare)
            lines.append(f"{name} lists components whose weights are missing: {some(names)}")
        if gone:
            judgement.doubts.append(f"{name} lists components that are missing: {some(gone)}")
        if held and not bare and not gone:
            judgement.proved.append(f"all {len(held):,} components in {name} exist")
    return judgement


def _held(folder: Folder, path: str, listed: dict[str, bool]) -> bool | None:
    """Return true if a component has weights; None if its folder is missing or empty. A link counts as weights."""
    for name in PurePosixPath(path).parts:
        if name in folder.odd or name in folder.links:
            return True
        below = folder.folders.get(name) or folder.folders.get(f"{name}_decoder")  # an ONNX export splits the VAE
        if below is None:  # older pipelines store their single model and the scheduler in the root folder
            return True if _FLAT & folder.files.keys() and not listed.keys() & folder.folders.keys() else None
        folder = below
    parts = [folder, *(f for n, f in folder.folders.items() if str(PurePosixPath(path, n)) not in listed)]
    names = [name for part in parts for name in (*part.files, *part.odd, *part.links)]
    return any(map(like_weights, names)) if names else None


def _pipeline(content: Any) -> Iterator[tuple[str, bool]]:
    """Yield each pipeline component's name, and true if it needs weights. Null components are omitted."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
            library, kind = value
            needed = library in ("diffusers", "transformers") and _MODEL.search(kind) and name not in _OPTIONAL
            yield name, bool(needed)


def _modules(content: Any) -> Iterator[tuple[str, bool]]:
    """Yield each module's path, and true if it needs weights. Older versions do not save a file for Normalize."""
    types = content.get("types") if isinstance(content, dict) else None  # a router's modules
    rows = content if isinstance(content, list) else []
    pairs = [(row.get("path"), row.get("type")) for row in rows if isinstance(row, dict)]
    for path, kind in types.items() if isinstance(types, dict) else pairs:
        if isinstance(path, str) and isinstance(kind, str) and not kind.endswith(".Normalize"):
            library, _, name = kind.rpartition(".")
            yield path, library.startswith("sentence_transformers.") and name in _MODULES


_LISTS = {"model_index.json": _pipeline, "modules.json": _modules, "router_config.json": _modules}
