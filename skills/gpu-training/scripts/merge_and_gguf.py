# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # weights
#   "transformers>=5.23,<6",  # model and tokenizer; the converter needs it too
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
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gputrain.folder import claim, emptied, lock, need_room, put_in_place, write_json
from gputrain.llama_cpp import find_or_build, read_back
from gputrain.outcome import Exit, Stop, complain, say, why_not_loaded
from gputrain.results import need_push, push
from gputrain.settings import Common, option, read_settings
from gputrain.smoke import MODEL, Smoke, with_inputs, write_adapter

TYPES = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_XS")
BLOCK = 256  # the number of weights in one block of a K type


@dataclass
class GgufSettings(Common):
    """Merging and conversion."""

    model: str = option("", "adapter or model to convert: folder or Hub id")
    base: str = option("", "base model of an adapter; empty: the one in the adapter's config")
    types: str = option("Q4_K_M,Q8_0", "GGUF types, comma-separated", choices=TYPES, several=True)
    fallback: bool = option(False, "accept another type for tensors whose size doesn't allow the requested type")
    llama_cpp: str = option("", "folder with llama.cpp's source; empty: download it")
    llama_cpp_build: str = option("", "folder for llama.cpp's build; empty: build-cpu below its source")
    pre_tokenizer: str = option("", "pre-tokenizer to use for a tokenizer that llama.cpp doesn't know, such as gpt-2")
    jobs: int = option(4, "number of parallel compiler processes", least=1)


def merge(settings: GgufSettings, kinds: list[str]) -> Path:
    """Write the complete model, with the adapter merged into its base, and return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = Path(settings.out)
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
    k_types = [kind for kind in kinds if "K" in kind or kind.startswith("IQ")]
    size = model.config.hidden_size
    if k_types and size % BLOCK and not settings.fallback:
        message = f"{', '.join(k_types)} need sizes in multiples of {BLOCK}; hidden_size is {size}"
        raise Stop(Exit.DATA, message, "choose Q8_0 or Q4_0, or pass --fallback")
    parameters = sum(p.numel() for p in model.parameters())
    # The merged model, the F16 file and one file of each type, each with at most 2 bytes per parameter.
    need_room(out, 2 * parameters * (2 + len(kinds)), "the merged model and its files", "or fewer --types")
    making = emptied(out, "merged")
    model.to(torch.float16).save_pretrained(making)
    tokenizer.save_pretrained(making)
    put_in_place(making, out / "merged")
    say(f"merged: {parameters:,} parameters in {out / 'merged'}")
    return out / "merged"


def write_files(settings: GgufSettings, merged: Path, kinds: list[str]) -> list[dict[str, Any]]:
    """Write a file for each type, and return the name, size and tensor types of each file."""
    out = Path(settings.out) / "gguf"
    out.mkdir(parents=True, exist_ok=True)
    for cut in out.glob("*.part"):
        cut.unlink()  # left by an earlier run that was killed
    quantizes = bool(set(kinds) - {"F16"})
    llama = find_or_build(settings.llama_cpp, settings.llama_cpp_build, settings.jobs, quantizes=quantizes)
    name = Path(settings.model).resolve().name if Path(settings.model).exists() else settings.model.split("/")[-1]
    full = out / f"{name}-F16.gguf"
    llama.convert(merged, full, settings.pre_tokenizer)
    found = []
    for kind in kinds:
        path = out / f"{name}-{kind}.gguf"
        if path != full:
            llama.quantize(full, path, kind, fallback=settings.fallback)
        found.append({"type": kind, **read_back(path)})
        say(f"{path.name}: {found[-1]['bytes']:,} bytes, {found[-1]['tensors']}")
    if "F16" not in kinds:
        full.unlink()
    return found


# F16 needs only llama.cpp's source; a build takes minutes.
SMOKE = ("--model", "{}/adapter", "--base", f"{{}}/{MODEL}", "--types", "F16", "--pre-tokenizer", "gpt-2")


def main() -> int:
    """Merge, convert and verify; return the exit code."""
    try:
        words = with_inputs(GgufSettings, sys.argv[1:], Smoke(write_adapter, SMOKE, trains=False))
        settings = read_settings(GgufSettings, words)
        say("settings: " + json.dumps(asdict(settings), sort_keys=True))
        out, kinds = Path(settings.out), [kind.strip() for kind in settings.types.split(",")]
        need_push(settings)
        lock(out)
        made = [name for name in ("merged", "gguf") if (out / name).exists()]
        claim(out / "conversion.json", {"model": settings.model, "base": settings.base}, made)
        files = write_files(settings, merge(settings, kinds), kinds)
        push(settings, out / "gguf")
        write_json(out / "result.json", {"status": "completed", "files": files})
    except Stop as stop:
        complain(stop)
        return int(stop.code)
    except OSError as error:
        complain(Stop(Exit.ENVIRONMENT, f"{out} can't be written: {error.strerror or error}", "check the disk"))
        return int(Exit.ENVIRONMENT)
    say(f"completed: {len(files)} files in {out / 'gguf'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
