"""Recognize a saved model or a part of a checkpoint by its path alone.

This is used for undeclared files on a machine that is about to be torn down, because their content is not available.
"""

from __future__ import annotations

import re
from typing import Final

_NAMES: Final = re.compile(
    r"""(?xi)
    .*\.(?: safetensors | pt | pth | ckpt | gguf | ggml | distcp | onnx | h5 | hdf5 | keras | msgpack | nemo | pdparams
          | tflite | mar | mlmodel | flax | params | weights | joblib | pkl | pickle | npz )
    | (?: pytorch_model | adapter_model | model | consolidated | optimizer | scheduler | training_args | weights
        | diffusion_pytorch_model | mp_rank_\d+ | state | random_states ) [\w.-]* \.bin
    | .* \.data-\d{5}-of-\d{5}
    | trainer_state\.json
    """
)
_FOLDERS: Final = re.compile(r"(?i)checkpoint[-_]?\d+|ckpt[-_]?\d+|global_step[-_]?\d+|epoch[-_]?\d+[-_]step[-_]?\d+")
_CACHES: Final = re.compile(
    r"(?x)/(?: (?:site|dist)-packages/ | (?:models|datasets|spaces)--[^/]+/(?:blobs|snapshots)/ | torch/hub/"
    r" | \.cache/ | node_modules/ )"
)


def checkpoint_like(path: str) -> bool:
    """Return whether a path names model weights or a part of a checkpoint.

    Files in a download cache or in installed packages do not count, because they can be downloaded again.
    """
    *folders, name = path.split("/")
    if _CACHES.search(f"/{path}"):
        return False
    return bool(_NAMES.fullmatch(name)) or any(_FOLDERS.fullmatch(folder) for folder in folders)
