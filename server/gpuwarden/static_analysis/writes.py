"""Find the folders and files that a training program writes, and code that was not analyzed and may write files.

A trainer saves automatically to the folder in its arguments. All other saves are calls with a path argument.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from gpuwarden.static_analysis.env_and_shell import Shell
from gpuwarden.static_analysis.mentions import mentions
from gpuwarden.static_analysis.static_eval import UNKNOWN, Call, Program
from gpuwarden.static_analysis.unread_code import can_save, unread_modules

# Maps the name of a call that saves to the name and position of its path argument.
_PATHS: Final[Mapping[str, tuple[str, int]]] = {
    "save_pretrained": ("save_directory", 0),
    "save_pretrained_merged": ("save_directory", 0),
    "save_pretrained_gguf": ("save_directory", 0),
    "save_pretrained_torchao": ("save_directory", 0),
    "save_lora_weights": ("save_directory", 0),
    "save_to_disk": ("dataset_path", 0),
    "save_to_hub": ("repo_id", 0),
    "save_checkpoint": ("filepath", 0),
    "save_file": ("filename", 1),
    "save_weights": ("filepath", 0),
    "save_adapter": ("save_directory", 0),
    "save_state": ("output_dir", 0),
    "_save": ("output_dir", 0),  # a method of Trainer, called with the model state
    "savefig": ("fname", 0),
    "save_image": ("fp", 1),
    "savez": ("file", 0),
    "savez_compressed": ("file", 0),
    "savetxt": ("fname", 0),
    "tofile": ("fid", 0),
    "to_pickle": ("path", 0),
    "to_csv": ("path_or_buf", 0),
    "to_json": ("path_or_buf", 0),
    "to_parquet": ("path", 0),
    "copytree": ("dst", 1),
    "copy": ("dst", 1),
    "copy2": ("dst", 1),
    "copyfile": ("dst", 1),
    "move": ("dst", 1),
    "write_text": ("", -1),
    "write_bytes": ("", -1),
}
_METHODS: Final = frozenset(name for name in _PATHS if "_" in name) | {"save_model", "save"}
"""Method names that suggest a save even if the object is unknown."""
_LOADS: Final = frozenset({"from_pretrained", "load_from_disk"})
_SAVERS: Final = frozenset({"save_model", "save", "fit", "ModelCheckpoint", "dump"})  # the path depends on the library
_YOLO: Final = frozenset({"ultralytics.YOLO", "ultralytics.RTDETR"})
_NOT_MODELS: Final = (
    r"hyperparameters|metrics|config|for_backward|log|plot|args|vocab|image|video|chrome|stacks|memory|text\b|svg|html"
)
MAY_SAVE: Final = re.compile(rf"export|(save|export)_(?!{_NOT_MODELS})\w+")
"""Matches the names of methods that may save a model and whose path argument is unknown."""
TEXT_SUFFIXES: Final = frozenset({".txt", ".log", ".csv", ".tsv", ".md"})
_REPORT_SUFFIXES: Final = TEXT_SUFFIXES | {".json", ".jsonl", ".html", ".png", ".jpg", ".pdf", ".yaml", ".svg", ".xlsx"}
"""Suffixes of files that can't hold a model's weights."""
_OPENS: Final = frozenset("open io.open gzip.open bz2.open codecs.open tarfile.open zipfile.ZipFile".split())  # noqa: SIM905
_WRITING: Final = re.compile(r"[rbtU]*[wax+][rwaxbt+U]*([:|]|$)")
_SENT_PATHS: Final[Mapping[str, int]] = {"put": 1, "put_file": 1, "upload": 1, "pipe": 0, "pipe_file": 0, "open": 0}
"""File system methods that write, with the position of the path argument."""
_HARMLESS: Final = frozenset("pip pip3 apt apt-get uv nvidia-smi git mkdir rm ls echo cd".split()) | {""}  # noqa: SIM905
LIGHTNING: Final = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_TRAINER_OUTPUT: Final = "trainer_output"  # the folder if a Trainer has no output_dir
_FITS: Final = frozenset({"backward", "fit", "train", "LightningCLI"})
# Libraries that write only through one of the calls above, or to the folder in a trainer's arguments.
_KNOWN: Final = frozenset(
    """torch torchvision torchaudio transformers trl peft datasets accelerate diffusers sentence_transformers lightning
    pytorch_lightning ultralytics unsloth numpy pandas scipy sklearn matplotlib seaborn PIL cv2 tqdm evaluate timm wandb
    trackio tensorboard tensorboardX mlflow safetensors bitsandbytes huggingface_hub tokenizers sentencepiece tiktoken
    einops torchmetrics albumentations yaml omegaconf tyro fire click typer packaging requests httpx psutil nltk
    sacrebleu rouge_score math_verify latex2sympy2_extended xformers flash_attn deepspeed librosa soundfile jsonlines
    rich dotenv kornia skimage regex jinja2 absl joblib gymnasium ale_py torchdata vllm openai kernels marimo colorama
    unsloth_zoo PyPDF2 bs4 pydantic snac qwen_vl_utils num2words optimum triton torchao ftfy hydra jiwer seqeval
    sacremoses prodigyopt lion_pytorch schedulefree galore_torch liger_kernel cut_cross_entropy causal_conv1d
    mamba_ssm bert_score pycocotools torchinfo apex emoji langdetect swanlab loguru tabulate termcolor""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Write:
    """One save. `path` is None if it is unknown, or if other code chooses the folder.

    `maybe` is true if the save depends on an unknown condition or setting, and `tried` if the program continues after a
    failed save.
    """

    line: int
    via: str
    path: str | None
    maybe: bool = False
    tried: bool = False


def trains(program: Program, trainers: Iterable[Call]) -> bool:
    """Return true if a program trains a model."""
    return any(trainers) or any(c.last in _FITS for c in program.calls if c.name != "self.train")


def writes_of(program: Program, trainers: Iterable[Call], settings: Mapping[str, Any]) -> Iterator[Write]:
    """Yield every save in a program. `settings` contains the values of its training configuration."""
    for call in trainers:
        if call.name.startswith(LIGHTNING):
            yield from lightning_writes(call)
        else:
            yield from trainer_writes(call, settings)
    for call in program.calls:
        if call.last == "LightningCLI":
            yield Write(call.line, "LightningCLI", "lightning_logs", call.maybe)
    made = {id(c.node) for c in trainers}
    holders = [n for n, _ in program.nodes if isinstance(n, ast.Assign) and id(n.value) in made]
    hugging = {t.id for n in holders for t in n.targets if isinstance(t, ast.Name)}
    for call in program.calls:
        yield from saved_by(program, call, hugging, settings)
    for mention in mentions(program):
        if mention.last in (_PATHS.keys() | _SAVERS if mention.imported else _METHODS):
            yield Write(mention.line, mention.last, None, maybe=True)


def trainer_writes(call: Call, settings: Mapping[str, Any]) -> Iterator[Write]:
    """Yield a Trainer's write to its output folder."""
    strategy = settings.get("save_strategy")
    if strategy == "no":
        return
    folder = settings.get("output_dir", UNKNOWN if "**" in settings else _TRAINER_OUTPUT)
    path = folder if isinstance(folder, str) else None
    yield Write(call.line, call.last, path, call.maybe or strategy is UNKNOWN)


def lightning_writes(call: Call) -> Iterator[Write]:
    """Yield the save for Lightning's automatic checkpoints; a logger or a callback may choose another folder."""
    asked, once = call.get("enable_checkpointing", default=True), call.get("fast_dev_run", default=False)
    if asked is False or once is True:
        return
    root = call.get("default_root_dir")
    elsewhere = any(call.get(name) is not None for name in ("logger", "callbacks"))
    path = root if isinstance(root, str) else "lightning_logs" if root is None and not elsewhere else None
    yield Write(call.line, call.last, path, call.maybe or asked is UNKNOWN)


def saved_by(program: Program, call: Call, trainers: set[str], settings: Mapping[str, Any]) -> Iterator[Write]:
    """Yield the save that a call performs, if any."""
    folder: Any = None
    owners = (*makers_of(program, call), call.name.rpartition(".")[0]) if call.last in _SENT_PATHS else ()
    if any(owner.endswith(("HfFileSystem", "hffs")) for owner in owners):
        path = call.get("path", _SENT_PATHS[call.last], UNKNOWN)
        reads = call.last == "open" and opened_path(call, named=True) is None
        folder = None if reads else f"hf://{path.removeprefix('hf://') if isinstance(path, str) else '?'}"
    elif call.last == "save_model" and (call.owner in trainers or call.owner.endswith("trainer")):
        folder = call.get("output_dir", 0, settings.get("output_dir", _TRAINER_OUTPUT))
    elif call.last == "train" and any(n in _YOLO for n in makers_of(program, call)):
        folder = call.get("project", default="runs")
    elif call.last in {"write_text", "write_bytes"} and isinstance(call.node, ast.Call):
        target = call.node.func
        folder = program.value(target.value, call.scope) if isinstance(target, ast.Attribute) else UNKNOWN
    elif call.name == "torch.onnx.export":
        folder = call.get("f", 2)
    elif call.last in _PATHS or call.last in _SAVERS:
        folder = named_path(call)
    elif call.name in _OPENS or call.last == "open":
        folder = opened_path(call)
    elif may_save(call) and call.last not in program.functions:
        folder = UNKNOWN
    if folder is not None:
        maybe = call.maybe or (call.last == "open" and UNKNOWN in (call.get("mode"), *call.args[1:2]))
        yield Write(call.line, f"{call.last}()", folder if isinstance(folder, str) else None, maybe, call.tried)


def may_save(call: Call) -> bool:
    """Return true if a method's name suggests that it saves a model, and its arguments do not name a report file."""
    given = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, str))
    report = any(PurePosixPath(value).suffix in _REPORT_SUFFIXES for value in given)
    return call.name.startswith(".") and MAY_SAVE.fullmatch(call.last) is not None and not report


def named_path(call: Call) -> Any:
    """Return the path argument of a call that saves; None if the call has no path and does not save anything."""
    match call.last:
        case "save_model":  # accelerate: the model, then the folder
            return call.args[1] if len(call.args) > 1 else call.get("save_directory", 0, UNKNOWN)
        case "save":  # `torch.save(object, path)`, `model.save(path)`
            whole = "f" in call.kwargs or len(call.args) > 1
            return call.get("f", 1, UNKNOWN) if whole else call.get("path", 0, UNKNOWN)
        case "fit":  # sentence-transformers
            return call.get("output_path")
        case "ModelCheckpoint":
            return call.get("dirpath", 0, "lightning_logs")
        case "dump":  # joblib; other `dump` functions write to an open file
            return call.get("filename", 1, UNKNOWN) if call.name == "joblib.dump" else None
    name, position = _PATHS[call.last]
    return call.get(name, position, UNKNOWN)


def opened_path(call: Call, *, named: bool = False) -> Any:
    """Return the path of a file that is opened for writing; None if the file is only read."""
    several = len(call.args) > 1 and not isinstance(call.args[1], int)  # unlike `path.open("w")`
    named = named or several or call.name in _OPENS
    mode = call.get("mode", 1 if named else 0, "r")
    if isinstance(mode, str) and not _WRITING.match(mode):
        return None
    return call.get("file", 0, UNKNOWN) if named else UNKNOWN


def makers_of(program: Program, call: Call) -> Iterator[str]:
    """Yield the dotted names of the calls that create the object on which a method is called."""
    match call.node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=func))):
            yield program.dotted(func)
    yield from program.makers.get(call.base, ())


def opened_folders(program: Program, local: Iterable[str]) -> Iterator[Call]:
    """Yield the calls that load from a relative folder (`./model`) that is not inside any of the program's paths."""
    made = {PurePosixPath(posixpath.normpath(path)) for path in local if path}
    for call in program.calls:
        path = call.get("pretrained_model_name_or_path", 0) if call.last in _LOADS else None
        if isinstance(path, str) and path.startswith("./"):
            folder = PurePosixPath(posixpath.normpath(path))
            if not any(folder.is_relative_to(p) or p.is_relative_to(folder) for p in made):
                yield call


def unseen_writers(program: Program, shells: Iterable[Shell], local: Iterable[str] = ()) -> Iterator[str]:
    """Yield descriptions of code that was not read and may write files. `local` lists the program's own folders."""
    yield from dict.fromkeys(words for words, _ in unread_modules(program, _known(local)))
    yield from _other_writers(program, shells)


def unseen_savers(
    program: Program, shells: Iterable[Shell], trainers: Iterable[Call], local: Iterable[str] = ()
) -> Iterator[str]:
    """Yield descriptions of code that was not read and may save the model."""
    modules: dict[str, list[ast.Import | ast.ImportFrom]] = {}
    for words, node in unread_modules(program, _known(local)):
        modules.setdefault(words, []).append(node)
    trainers = tuple(trainers)
    yield from (words for words, nodes in modules.items() if can_save(program, nodes, trainers))
    yield from _other_writers(program, shells)


def _known(local: Iterable[str]) -> frozenset[str]:
    return _KNOWN | sys.stdlib_module_names | {path.removeprefix("./").partition("/")[0] for path in local}


def _other_writers(program: Program, shells: Iterable[Shell]) -> Iterator[str]:
    """Yield callbacks in the script, code that is executed from a string, and programs that the script starts."""
    for node, _ in program.nodes:
        if isinstance(node, ast.ClassDef) and any(program.dotted(b).endswith("Callback") for b in node.bases):
            yield f"the callback {node.name}"
    if any(c.name in {"exec", "runpy.run_path", "runpy.run_module", "importlib.import_module"} for c in program.calls):
        yield "code that is run from a file or a string"
    for shell in shells:
        known = shell.program in _HARMLESS or shell.words[1:3] == ("-m", "pip")
        if not known or {"push", "run"} & {*shell.words}:
            yield "a program whose name is unknown" if shell.program == "?" else f"the program {shell.program}"
