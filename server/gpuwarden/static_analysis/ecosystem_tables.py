"""Tables of facts about training libraries, for the submit gate's rules.

The tables were checked in November 2026, against trl 1.16, transformers 5.23, accelerate 1.15, datasets 5.2, peft 0.21
and torch 2.15. When a library changes, only this file needs an update.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# ------------------------------------------------------------------------------------------------------ methods

# The training method of each trainer. trl keeps experimental trainers in separate modules.
TRAINERS: dict[str, str] = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "KTOTrainer": "kto",
    "GRPOTrainer": "grpo",
    "AsyncGRPOTrainer": "async_grpo",
    "RLOOTrainer": "rloo",
    "OnlineDPOTrainer": "rloo",
    "RewardTrainer": "reward",
    "DistillationTrainer": "sft",
    "GKDTrainer": "sft",
}
CONFIGS: dict[str, str] = {name.removesuffix("Trainer") + "Config": method for name, method in TRAINERS.items()}

# A dataset needs all columns from at least one of its method's sets.
COLUMNS: dict[str, tuple[frozenset[str], ...]] = {
    "sft": (
        frozenset({"text"}),
        frozenset({"messages"}),
        frozenset({"prompt", "completion"}),
        frozenset({"input_ids"}),
        frozenset({"conversations"}),
    ),
    "dpo": (frozenset({"chosen", "rejected"}),),
    "orpo": (frozenset({"chosen", "rejected"}),),
    "cpo": (frozenset({"chosen", "rejected"}),),
    "reward": (frozenset({"chosen", "rejected"}),),
    "kto": (frozenset({"prompt", "completion", "label"}), frozenset({"chosen", "rejected"})),
    "grpo": (frozenset({"prompt"}),),
    "async_grpo": (frozenset({"prompt"}),),
    "rloo": (frozenset({"prompt"}),),
    "detection": (frozenset({"image", "objects"}),),
    "classification": (frozenset({"image", "label"}), frozenset({"image", "labels"}), frozenset({"img", "label"})),
    "segmentation": (frozenset({"image", "mask"}), frozenset({"image", "label"}), frozenset({"image", "annotation"})),
}

# Other common names for a column. If a dataset uses one, a finding recommends renaming the column.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "text": ("content", "document", "body", "article", "sentence"),
    "messages": ("conversation", "conversations", "chat", "dialogue", "turns"),
    "prompt": ("instruction", "question", "input", "query", "problem", "user"),
    "completion": ("output", "response", "answer", "target", "assistant", "solution"),
    "chosen": ("chosen_response", "preferred", "accepted", "winner", "response_j", "better"),
    "rejected": ("rejected_response", "dispreferred", "loser", "response_k", "worse"),
    "label": ("labels", "class", "category", "preference", "thumbs_up", "is_good"),
    "image": ("img", "picture", "pixel_values", "photo"),
    "objects": ("annotations", "bboxes", "boxes", "litter"),
    "mask": ("masks", "segmentation", "annotation", "seg", "label"),
    "anchor": ("query", "question"),
    "positive": ("pos", "answer", "passage", "document", "response"),
    "negative": ("neg", "hard_negative"),
    "sentence1": ("text1", "sent1"),
    "sentence2": ("text2", "sent2"),
    "score": ("similarity_score", "similarity"),
    "answer": ("solution", "final_answer", "ground_truth", "target", "gold"),
}

# Model heads in transformers that indicate the training method of a plain Trainer.
HEADS: dict[str, str] = {
    "ForObjectDetection": "detection",
    "ForImageClassification": "classification",
    "ForSemanticSegmentation": "segmentation",
    "ForInstanceSegmentation": "segmentation",
    "ForUniversalSegmentation": "segmentation",
}

# -------------------------------------------------------------------------------------------------- dependencies

# Maps import names to the packages that provide them, if the names differ. Any of the packages provides the import.
DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "sklearn": ("scikit-learn",),
    "PIL": ("pillow",),
    "cv2": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "yaml": ("pyyaml",),
    "bs4": ("beautifulsoup4",),
    "dotenv": ("python-dotenv",),
    "skimage": ("scikit-image",),
    "dateutil": ("python-dateutil",),
    "flash_attn": ("flash-attn",),
    "git": ("gitpython",),
    "google": ("protobuf", "google-cloud-storage"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "pkg_resources": ("setuptools",),
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning", "lightning"),
    "unsloth_zoo": ("unsloth", "unsloth-zoo"),
    "Crypto": ("pycryptodome",),
    "attr": ("attrs",),
    "serial": ("pyserial",),
    "faiss": ("faiss-cpu", "faiss-gpu"),
    "mpl_toolkits": ("matplotlib",),
    "torch": ("torch", "torch-nightly"),
    "open_clip": ("open-clip-torch",),
    "segmentation_models_pytorch": ("segmentation-models-pytorch",),
    "clip": ("openai-clip", "clip"),
    "pydrive": ("pydrive2", "pydrive"),
    "apex": ("apex", "nvidia-apex"),
    "umap": ("umap-learn",),
    "Levenshtein": ("levenshtein", "python-levenshtein"),
    "hydra": ("hydra-core",),
    "pynvml": ("nvidia-ml-py", "pynvml"),
    "gym": ("gym", "gymnasium"),
    "IPython": ("ipython",),
    "rouge_score": ("rouge-score",),
    "jose": ("python-jose",),
    "fitz": ("pymupdf",),
    "wandb": ("wandb",),
    "typing_extensions": ("typing-extensions",),
}

# Maps each package to packages that it definitely depends on.
BRINGS: dict[str, frozenset[str]] = {
    k: frozenset(v.split())
    for k, v in {
        "transformers": "huggingface-hub numpy tokenizers safetensors tqdm pyyaml packaging regex",
        "trl": "transformers datasets accelerate",
        "accelerate": "torch numpy safetensors huggingface-hub psutil pyyaml packaging",
        "peft": "torch transformers accelerate safetensors huggingface-hub numpy psutil tqdm pyyaml packaging",
        "datasets": "numpy pandas pyarrow fsspec huggingface-hub tqdm dill multiprocess packaging pyyaml",
        "torchvision": "torch numpy pillow",
        "torchaudio": "torch",
        "timm": "torch torchvision huggingface-hub safetensors pyyaml",
        "unsloth": "unsloth-zoo torch torchvision numpy tqdm psutil tyro protobuf xformers bitsandbytes triton "
        "datasets sentencepiece accelerate peft huggingface-hub hf-transfer diffusers transformers trl typer rich "
        "pydantic pyyaml",
        "unsloth-zoo": "torch torchao triton tyro accelerate trl peft cut-cross-entropy einops packaging transformers "
        "datasets sentencepiece tqdm psutil numpy protobuf huggingface-hub hf-transfer pillow regex msgspec filelock "
        "typing-extensions requests",
        "sentence-transformers": "torch transformers scikit-learn scipy huggingface-hub tqdm",
        "torchmetrics": "torch numpy packaging",
        "lightning": "torch torchmetrics pyyaml tqdm packaging fsspec",
        "pytorch-lightning": "torch torchmetrics pyyaml tqdm packaging fsspec",
        "bitsandbytes": "torch numpy packaging",
        "diffusers": "huggingface-hub pillow numpy regex safetensors requests",
        "evaluate": "datasets numpy pandas tqdm huggingface-hub fsspec",
        "deepspeed": "torch numpy tqdm psutil pydantic packaging",
        "vllm": "torch transformers numpy pillow",
        "ultralytics": "torch torchvision numpy opencv-python matplotlib pillow pyyaml requests scipy psutil",
        "albumentations": "numpy scipy pyyaml pydantic opencv-python-headless",
        "monai": "torch numpy",
        "scikit-learn": "numpy scipy joblib threadpoolctl",
        "pandas": "numpy python-dateutil pytz",
        "scipy": "numpy",
        "matplotlib": "numpy pillow packaging python-dateutil",
        "seaborn": "matplotlib pandas numpy",
        "pycocotools": "numpy matplotlib",
        "segmentation-models-pytorch": "torch torchvision timm numpy pillow huggingface-hub safetensors tqdm",
        "open-clip-torch": "torch torchvision timm huggingface-hub safetensors regex ftfy tqdm",
        "torchtune": "datasets huggingface-hub safetensors tokenizers sentencepiece tiktoken tqdm",
        "axolotl": "torch transformers peft accelerate datasets bitsandbytes",
        "wandb": "requests pyyaml protobuf click pydantic packaging psutil",
        "trackio": "pandas huggingface-hub",
        "tensorboard": "numpy protobuf pillow",
        "mlflow": "numpy pandas scikit-learn pyyaml requests",
        "xgboost": "numpy scipy",
        "lightgbm": "numpy scipy",
        "torch-geometric": "numpy tqdm requests",
        "kornia": "torch",
        "einops-exts": "einops",
        "flash-attn": "torch einops",
        "xformers": "torch numpy",
        "gguf": "numpy pyyaml tqdm",
        "optimum": "torch transformers huggingface-hub numpy packaging",
        "setfit": "datasets sentence-transformers evaluate huggingface-hub scikit-learn",
        "transformers[torch]": "torch accelerate",
        "transformers[vision]": "pillow",
        "transformers[sentencepiece]": "sentencepiece protobuf",
        "trl[vllm]": "vllm",
        "trl[peft]": "peft",
        "trl[quantization]": "bitsandbytes",
        "trl[deepspeed]": "deepspeed",
        "trl[vlm]": "pillow torchvision",
        "datasets[vision]": "pillow",
        "torchmetrics[detection]": "torchvision pycocotools",
        "accelerate[deepspeed]": "deepspeed",
        "causal-conv1d": "torch packaging ninja",
        "cut-cross-entropy": "torch triton",
        "decord": "numpy",
        "gymnasium": "numpy cloudpickle",
        "h5py": "numpy",
        "hydra-core": "omegaconf packaging",
        "imageio": "numpy pillow",
        "jinja2": "markupsafe",
        "jiwer": "click rapidfuzz",
        "kernels": "huggingface-hub packaging pyyaml",
        "kagglehub": "requests tqdm packaging pyyaml",
        "latex2sympy2-extended": "sympy",
        "liger-kernel": "torch triton",
        "lion-pytorch": "torch",
        "marimo": "click jedi markdown pygments pyyaml psutil starlette uvicorn websockets packaging msgspec narwhals",
        "math-verify": "latex2sympy2-extended",
        "nltk": "click joblib regex tqdm",
        "numba": "numpy",
        "omegaconf": "pyyaml",
        "openai": "httpx pydantic tqdm anyio",
        "prodigyopt": "torch",
        "qwen-vl-utils": "av packaging pillow requests",
        "rouge-score": "nltk numpy six",
        "sacrebleu": "numpy regex tabulate lxml",
        "seqeval": "numpy scikit-learn",
        "soundfile": "numpy cffi",
        "sympy": "mpmath",
        "tensorboardx": "numpy protobuf packaging",
        "tiktoken": "regex requests",
        "torch-fidelity": "torch torchvision numpy pillow scipy tqdm",
        "torchdata": "torch requests",
        "wordcloud": "numpy pillow matplotlib",
        "fastai": "torch torchvision pandas numpy matplotlib scikit-learn scipy pyyaml pillow",
    }.items()
}

_PLAIN = """
addict av cffi click cloudpickle dill easydict editdistance emoji filelock fire ftfy hf-transfer hf-xet jieba joblib
jsonlines loguru lxml msgspec ninja num2words nvidia-ml-py orjson packaging prettytable pydantic pynvml pytest
python-dotenv python-levenshtein pyyaml rapidfuzz rich ruff schedulefree setuptools simplejson six snac tabulate
termcolor toml torchao torchcodec torchinfo torchsummary triton typer tyro ujson uv wget wheel xxhash zstandard
"""
"""Packages that do not depend on any library that training scripts import."""
KNOWN: frozenset[str] = frozenset(BRINGS) | frozenset().union(*BRINGS.values()) | frozenset(_PLAIN.split())
"""Packages whose dependencies are listed here."""


def canonical_name(name: str) -> str:
    """Return the normalized form of a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirement(text: str) -> Requirement | None:
    """Parse a PEP 508 requirement. Return None for other text, such as a bare URL."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def closure(names: Iterable[str]) -> frozenset[str]:
    """Return the packages and all their definite dependencies."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += BRINGS.get(name, ())
    return frozenset(found)


def listed(dependencies: Iterable[str], installed: Iterable[str] = ()) -> frozenset[str]:
    """Return the packages in a header and those that the script installs itself, with `name[extra]` for each extra."""
    found: set[str] = set()
    for text in (*dependencies, *installed):
        if requirement := read_requirement(text):
            name = canonical_name(requirement.name)
            found |= {name, *(f"{name}[{extra}]" for extra in requirement.extras)}
    return frozenset(found)


def distributions(module: str) -> tuple[str, ...]:
    """Return the packages that provide a module."""
    return DISTRIBUTIONS.get(module, (canonical_name(module),))


# ----------------------------------------------------------------------------------------------- system programs

BUILD_TOOLS = frozenset({"make", "cmake", "gcc", "g++", "cc", "nvcc", "ninja", "clang"})
SYSTEM_TOOLS = BUILD_TOOLS | {
    "ffmpeg",
    "git-lfs",
    "aria2c",
    "unzip",
    "wget",
    "rsync",
    "pigz",
    "jq",
    "tmux",
    "p7zip",
    "7z",
}

# Maps apt packages to the programs that they provide.
APT: Mapping[str, frozenset[str]] = {
    "build-essential": frozenset({"make", "gcc", "g++", "cc"}),
    "p7zip-full": frozenset({"7z", "p7zip"}),
    "aria2": frozenset({"aria2c"}),
    "ninja-build": frozenset({"ninja"}),
    "cuda-toolkit": frozenset({"nvcc"}),
    "nvidia-cuda-toolkit": frozenset({"nvcc"}),
}

# Environment variables that platforms, launchers and libraries set, or that every process has.
_GIVEN = """
HOME PATH USER PWD TMPDIR SHELL LANG HOSTNAME LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES CUDA_HOME OMP_NUM_THREADS
RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NODE_RANK
SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_NODELIST SLURM_SUBMIT_DIR
JOB_ID ACCELERATOR CPU_CORES MEMORY
GPUWARDEN_JOB GPUWARDEN_ATTEMPT
"""
GIVEN_VARIABLES = frozenset(_GIVEN.split())

# Additional variables that the runner sets. A serverless platform has no runner.
RUNNER_VARIABLES = frozenset(
    {"GPUWARDEN_RUN_DIR", "GPUWARDEN_OUTPUT_DIR", "GPUWARDEN_METRICS", "GPUWARDEN_RESTARTS", "USER_ID"}
)

# Maps the variable for the report URL to the variable for the job's key. The runner sets both unless the job sets
# the URL.
REPORT_VARIABLES: Mapping[str, str] = {"METRICS_API_URL": "JOB_TOKEN", "ALERT_API_URL": "INTERNAL_API_KEY"}
