# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # weights
#   "transformers>=5.23,<6",  # model and tokenizer, also for the converter
#   "peft>=0.21,<1",  # loads and merges adapters
#   "accelerate>=1.15,<2",  # loads large models
#   "safetensors>=0.5,<1",  # the format of the weights
#   "gguf>=0.19,<1",  # reads back every written file
#   "numpy>=2,<3",  # GGUF tensors
#   "sentencepiece>=0.2,<1",  # tokenizers that the converter reads; without it the conversion fails silently
#   "protobuf>=5,<8",  # needed by the same tokenizers
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "pip>=25,<27",  # downloads the source of llama.cpp
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
# ]
# ///
"""Merge an adapter into its base model, and write GGUF files for llama.cpp.

llama.cpp is built with CMake for the CPU, so the build needs no GPU and works in every image; `--llama-cpp FOLDER` uses
an existing source tree, with or without a build. Every file is read back to check its tensors and their types.

    uv run merge_and_gguf.py --model out/final --types Q4_K_M,Q8_0

Exit codes: 0 done, 2 invalid settings, 3 problem with the model or its tokenizer, 4 out of memory, 6 machine or access
problem, 7 push failed. `--help` lists the settings. Each setting is also a key of `--config FILE` and an environment
variable TRAIN_NAME.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gputrain.folder import lock, put_in_place, write_json
from gputrain.outcome import Exit, Stop, complain, say, why_not_loaded
from gputrain.settings import Checked, option, read_settings
from gputrain.smoke import MODEL, Smoke, with_inputs
from gputrain.smoke_text import write_language_model

SOURCE = "llama-cpp-python==0.3.36"  # its source archive contains llama.cpp with the converter and the build files
TYPES = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_XS")
BLOCK = 256
CLAIM = "conversion.json"
PROGRAMS = {"cmake": "cmake", "g++": "g++", "make": "make"}
RECOGNIZE = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); name = sys.argv[2]; sys.argv = sys.argv[3:]; "
    "import conversion.base as base; base.TextModel.get_vocab_base_pre = lambda self, tokenizer: name; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass
class GgufSettings(Checked):
    """Merging and conversion."""

    smoke: bool = option(False, "convert an adapter of a tiny random model, to try the script and the machine")
    model: str = option("", "adapter or model: folder or Hub id")
    base: str = option("", "base model of an adapter; empty: the one in the adapter's config")
    out: str = option("out", "output folder")
    types: str = option("Q4_K_M,Q8_0", "GGUF types, comma-separated")
    fallback: bool = option(False, "accept tensors of another type if the model's sizes don't allow the requested type")
    llama_cpp: str = option("", "folder with llama.cpp's source; empty: download it")
    llama_cpp_build: str = option("", "folder for its build; empty: build-cpu below its source")
    pre_tokenizer: str = option("", "pre-tokenizer to use for a tokenizer that llama.cpp doesn't know, such as gpt-2")
    jobs: int = option(4, "number of parallel compilers", least=1)
    hub_model_id: str = option("", "Hub repo to push the files to, owner/name; needs HF_TOKEN")

    def check(self) -> None:
        """Raise Stop if settings contradict each other."""
        if not self.model:
            raise Stop(Exit.CONFIG, "model is not set", "pass --model ID_OR_FOLDER")
        for kind in self.kinds():
            if kind not in TYPES:
                raise Stop(Exit.CONFIG, f"types has {kind!r}", f"choose among {', '.join(TYPES)}")
        if self.hub_model_id and not os.environ.get("HF_TOKEN", ""):
            raise Stop(Exit.ENVIRONMENT, "hub_model_id is set, but HF_TOKEN is not", "pass HF_TOKEN as a secret")

    def kinds(self) -> list[str]:
        """Return the requested types."""
        return [kind.strip().upper() for kind in self.types.split(",") if kind.strip()]


def call(words: list[str], what: str, **more: Any) -> str:
    """Run a program and return its output.

    Raises:
        Stop: the program is missing or failed; its last lines are printed first.

    """
    say(f"{what}: {' '.join(words[:6])}")
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, **more)
    except FileNotFoundError:
        raise Stop(Exit.ENVIRONMENT, f"{what}: {words[0]} is not installed", f"install {words[0]}") from None
    except subprocess.CalledProcessError as error:
        print(error.stdout[-3000:], error.stderr[-3000:], sep="\n", file=sys.stderr)
        lines = (error.stderr.strip() or error.stdout.strip()).splitlines()
        message = f"{what} failed: {lines[-1][:200] if lines else error.returncode}"
        raise Stop(Exit.ENVIRONMENT, message, "see the lines above") from error
    return done.stdout + done.stderr


def need_programs() -> None:
    """Install the programs that a build needs if this process has permission; otherwise raise Stop."""
    missing = sorted({package for name, package in PROGRAMS.items() if not shutil.which(name)})
    if not missing:
        return
    if not shutil.which("apt-get") or not hasattr(os, "geteuid") or os.geteuid():
        raise Stop(Exit.ENVIRONMENT, f"{', '.join(missing)} are not installed", "install them, or pass --llama-cpp")
    call(["apt-get", "update", "-qq"], "system packages")
    call(["apt-get", "install", "-y", "-qq", "build-essential", "cmake"], "system packages")


def download() -> Path:
    """Return the folder of llama.cpp's source, downloaded once."""
    kept = Path.home() / ".cache" / SOURCE.replace("==", "-")
    inner = f"{SOURCE.replace('-', '_').replace('==', '-')}/vendor/llama.cpp"
    if not (kept / inner).exists():
        making = kept.with_name(f".{kept.name}-{os.getpid()}")
        making.mkdir(parents=True)
        ask = ["download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(making), SOURCE]
        call([sys.executable, "-m", "pip", *ask], "source of llama.cpp")
        [archive] = making.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(making, filter="data")
        archive.unlink()
        put_in_place(making, kept)
    return kept / inner


def tools(settings: GgufSettings, needs_quantize: bool) -> tuple[Path, Path]:
    """Return llama.cpp's source and its quantizer, built if it is missing."""
    source = Path(settings.llama_cpp) if settings.llama_cpp else download()
    if not (source / "convert_hf_to_gguf.py").exists():
        raise Stop(Exit.CONFIG, f"{source} does not contain convert_hf_to_gguf.py", "correct --llama-cpp")
    build = Path(settings.llama_cpp_build or source / "build-cpu")
    quantize = build / "bin" / "llama-quantize"
    if needs_quantize and not quantize.exists():
        need_programs()
        off = [f"-D{name}=OFF" for name in ("GGML_CUDA", "GGML_NATIVE", "LLAMA_CURL", "LLAMA_BUILD_TESTS")]
        call(["cmake", "-B", str(build), "-S", str(source), "-DCMAKE_BUILD_TYPE=Release", *off], "configuration")
        call(["cmake", "--build", str(build), "--target", "llama-quantize", "-j", str(settings.jobs)], "build")
    return source, quantize


def claim_output(settings: GgufSettings) -> None:
    """Claim the output folder for this conversion.

    Raises:
        Stop: the folder contains the files of another model, or can't be written.

    """
    out = Path(settings.out)
    lock(out)
    mine = {"model": settings.model, "base": settings.base}
    made = [name for name in ("merged", "gguf") if (out / name).exists()]
    try:
        theirs = json.loads((out / CLAIM).read_text())
    except (OSError, ValueError):
        theirs = None
    if made and theirs != mine:
        message = f"{out} contains {' and '.join(made)} of {theirs['model'] if theirs else 'an unknown model'}"
        raise Stop(Exit.CONFIG, message, "choose another --out, or move them away; nothing there was changed")
    write_json(out / CLAIM, mine)


def merged(settings: GgufSettings) -> Path:
    """Write the complete model, with the adapter merged into its base, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = Path(settings.out)
    making, final = out / ".saving" / "merged", out / "merged"
    shutil.rmtree(making, ignore_errors=True)
    try:
        if (Path(settings.model) / "adapter_config.json").exists() or settings.base:
            from peft import PeftConfig, PeftModel

            base = settings.base or PeftConfig.from_pretrained(settings.model).base_model_name_or_path
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            model = PeftModel.from_pretrained(model, settings.model).merge_and_unload(safe_merge=True)
        else:
            model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
    except ValueError as error:
        text = " ".join(str(error).split())[:200]
        raise Stop(Exit.DATA, f"{settings.model} can't be merged: {text}", "train again, or check --base") from error
    except Exception as error:
        raise why_not_loaded(settings.model, error) from error
    k_types = [kind for kind in settings.kinds() if "K" in kind or kind.startswith("IQ")]
    size = model.config.hidden_size
    if k_types and size % BLOCK and not settings.fallback:
        message = f"{', '.join(k_types)} need sizes in multiples of {BLOCK}; hidden_size is {size}"
        raise Stop(Exit.DATA, message, "choose Q8_0 or Q4_0, or pass --fallback")
    # The merged model, the F16 file and one file of each type, each with at most 2 bytes per parameter.
    needed = 2 * sum(p.numel() for p in model.parameters()) * (2 + len(settings.kinds()))
    if (free := shutil.disk_usage(out).free) < needed:
        message = f"{out} has {free / 1e9:.1f} GB free; the merged model and its files need {needed / 1e9:.1f} GB"
        raise Stop(Exit.ENVIRONMENT, message, "choose a larger disk, or fewer --types")
    model.to(torch.float16).save_pretrained(making)
    tokenizer.save_pretrained(making)
    put_in_place(making, final)
    say(f"merged: {sum(p.numel() for p in model.parameters()):,} parameters in {final}")
    return final


def proven(path: Path) -> dict[str, Any]:
    """Return the name, size and tensor types of a GGUF file, read to its last tensor.

    Raises:
        Stop: the file is truncated, or has no tensors.

    """
    import numpy as np
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        kinds: dict[str, int] = {}
        for tensor in reader.tensors:
            kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
            if tensor.data.dtype in (np.float16, np.float32) and not bool(np.isfinite(tensor.data).all()):
                raise Stop(Exit.DATA, f"{path.name}: {tensor.name} has values that aren't finite", "train again")
    except (ValueError, IndexError, KeyError) as error:
        raise Stop(Exit.ENVIRONMENT, f"{path.name} is incomplete: {error}", "write it again; check the disk") from error
    if not kinds:
        raise Stop(Exit.ENVIRONMENT, f"{path.name} contains no tensors", "see the converter's output above")
    return {"file": path.name, "bytes": path.stat().st_size, "tensors": kinds}


def written(settings: GgufSettings, folder: Path) -> list[dict[str, Any]]:
    """Write a file for each type, and return the name, size and tensor types of each."""
    out, kinds = Path(settings.out) / "gguf", settings.kinds()
    out.mkdir(parents=True, exist_ok=True)
    for cut in out.glob("*.part"):
        cut.unlink()  # left by an earlier run that was killed
    source, quantize = tools(settings, bool(set(kinds) - {"F16", "BF16"}))
    name = Path(settings.model).resolve().name if Path(settings.model).exists() else settings.model.split("/")[-1]
    first = out / f"{name}-F16.gguf"
    convert = str(source / "convert_hf_to_gguf.py")
    words = [convert, str(folder), "--outfile", str(first) + ".part", "--outtype", "f16"]
    if settings.pre_tokenizer:
        words = ["-c", RECOGNIZE, str(source), settings.pre_tokenizer, *words]
    call([sys.executable, *words], "conversion")
    Path(f"{first}.part").replace(first)
    found = []
    for kind in kinds:
        path = out / f"{name}-{kind}.gguf"
        if path != first:
            said = call([str(quantize), str(first), f"{path}.part", kind], f"quantization {kind}")
            Path(f"{path}.part").replace(path)
            if "fallback quantization" in said and not settings.fallback:
                message = f"{kind}: some tensors fell back to another type"
                raise Stop(Exit.DATA, message, "choose another type, or pass --fallback")
        found.append({"type": kind, **proven(path)})
        say(f"{path.name}: {found[-1]['bytes']:,} bytes, {found[-1]['tensors']}")
    if "F16" not in kinds:
        first.unlink()
    return found


def publish(settings: GgufSettings) -> None:
    """Upload the files."""
    if not settings.hub_model_id:
        return
    from huggingface_hub import HfApi

    api = HfApi(token=os.environ.get("HF_TOKEN", ""))
    try:
        api.create_repo(settings.hub_model_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=settings.hub_model_id, folder_path=Path(settings.out) / "gguf")
    except Exception as error:
        message = f"the push to {settings.hub_model_id} failed: {' '.join(str(error).split())[:200]}"
        raise Stop(Exit.PUSH, message, f"{settings.out}/gguf is complete; upload it from there") from error


def write_adapter(folder: Path) -> None:
    """Save a random model for a smoke run, and an adapter for this model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_language_model(folder / MODEL, hidden=BLOCK)
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / MODEL), LoraConfig(task_type="CAUSAL_LM"))
    adapter.save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(folder / MODEL).save_pretrained(folder / "adapter")


# F16 needs only llama.cpp's source; a build takes minutes.
SMOKE = ("--model", "{}/adapter", "--base", f"{{}}/{MODEL}", "--types", "F16", "--pre-tokenizer", "gpt-2")


def main() -> int:
    """Merge, convert and verify; return the exit code."""
    try:
        words = with_inputs(GgufSettings, sys.argv[1:], Smoke(write_adapter, SMOKE, trains=False))
        settings = read_settings(GgufSettings, words)
        say("settings: " + json.dumps(asdict(settings), sort_keys=True))
        claim_output(settings)
        files = written(settings, merged(settings))
        publish(settings)
        write_json(Path(settings.out) / "result.json", {"status": "completed", "files": files})
    except Stop as stop:
        complain(stop)
        return int(stop.code)
    except OSError as error:
        stop = Stop(Exit.ENVIRONMENT, f"{settings.out} can't be written: {error.strerror or error}", "check the disk")
        complain(stop)
        return int(stop.code)
    say(f"completed: {len(files)} files in {settings.out}/gguf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
